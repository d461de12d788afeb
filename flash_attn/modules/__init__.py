"""The parts of transformers: attention with its projections, MLPs, blocks, embeddings."""
