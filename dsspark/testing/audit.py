"""Is *your* sampler, scheduler or source of noise lossless? Audits that answer with a counterexample, not with a p-value.

from dsspark.testing.audit import audit_scheduler

report = audit_scheduler(my_scheduler)
print(report)
report.assert_lossless()
"""

from dsspark.testing.adapters import OutsideSampler
from dsspark.testing.errors import LosslessnessError
from dsspark.testing.report import AuditReport, Finding
from dsspark.testing.rng_audit import audit_rng
from dsspark.testing.sampler_audit import audit_sampler
from dsspark.testing.scheduler_audit import audit_scheduler

__all__ = [
    "AuditReport",
    "Finding",
    "LosslessnessError",
    "OutsideSampler",
    "audit_rng",
    "audit_sampler",
    "audit_scheduler",
]
