"""A real model: SmolLM2-135M-Instruct, the data it writes for its own drafter, the drafter's training, and a demo.

`python -m dsspark smollm2 prepare | train | evaluate` and `python -m dsspark demo --model smollm2`. Needs `INSTALL`.
"""
