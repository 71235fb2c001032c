"""The choice of parameters: which float tensors are trained, and which are constants by the role they play."""
