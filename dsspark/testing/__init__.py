"""The losslessness kit: exact laws, audits and mutants, for this library's samplers and schedulers and for anybody else's."""
