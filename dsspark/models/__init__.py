"""The target language model, the parallel backbone, the heads and the drafters."""
