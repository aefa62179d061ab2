"""A worker without a model, for those who develop the front: made-up answers over the real protocol, and no torch."""
