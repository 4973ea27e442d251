"""What a drafter is worth on held-out text: accepted length, acceptance by position, confidence, latency, each with its interval."""
