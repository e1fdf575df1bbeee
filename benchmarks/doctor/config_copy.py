"""pytorch #115122: a generation loop copies its settings before it changes one."""

import copy

import torch


class Settings:
    def __init__(self):
        self.temperature, self.steps, self.stops = 0.7, 3, [0, 2]


@torch.compile(backend="eager")
def sample(logits, settings):
    settings = copy.deepcopy(settings)
    settings.temperature = 1.0 if settings.steps > 2 else settings.temperature
    return (logits / settings.temperature).softmax(-1)


sample(torch.rand(2, 9), Settings())
