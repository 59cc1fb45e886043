"""One HTML page that shows what a run did and why its steps took the time they took."""
