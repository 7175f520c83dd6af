"""Does a checkpoint fit FP16: its weights, its activations, and the gradients of a real RL loss."""
