"""Low-rank adapters of a worker: where they go, how they are loaded and kept, and how a batch runs under several."""
