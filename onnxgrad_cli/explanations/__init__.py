"""Why a model says what it says: attributions of a score to what the model is fed, and inputs that fool it.

One module a method. All work on a `Case`, the samples with their scores and the gradients of these.
"""
