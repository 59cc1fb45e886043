"""What a user runs: recipes, the Ray job entry point and cluster manifests."""
