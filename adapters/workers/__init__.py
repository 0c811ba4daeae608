"""Workers of reinforcement learning: the policy on ranks of torchrun or on Ray actors."""
