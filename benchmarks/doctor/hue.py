"""vision #8171: the hue of an image is filled in channel by channel, where that channel is the largest."""

import torch


@torch.compile(backend="eager")
def hue(image):
    red, green, blue = image.unbind(0)
    top = image.amax(0)
    made = torch.zeros_like(top)
    made[top == green] = (blue - red)[top == green] + 2
    made[top == blue] = (red - green)[top == blue] + 4
    return made / 6


torch.manual_seed(0)
hue(torch.rand(3, 6, 6))
