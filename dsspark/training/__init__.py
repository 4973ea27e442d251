"""Training of the shipped models: corpus, target, drafters, calibration, evaluation."""
