"""What a run shows and writes down while it goes: metrics, samples, the live view."""
