"""pytorch #133725: a generator of Python is made from a drawn seed, and shifts the input."""

import random

import torch


@torch.compile(backend="eager")
def shift(x):
    generator = random.Random(random.randint(0, 100))
    return (x + generator.randrange(10)).sin()


random.seed(0)
shift(torch.ones(4))
