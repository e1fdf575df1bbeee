"""torchaudio: a band of a spectrogram is masked, and a drawn width is checked."""

import torch


def mask_along_axis(specgram, mask_param, axis):
    value = torch.rand(1) * mask_param
    start = torch.rand(1) * (specgram.size(axis) - value)
    mask_start = start.long().squeeze()
    mask_end = mask_start + value.long().squeeze()
    mask = torch.arange(0, specgram.shape[axis])
    mask = (mask >= mask_start) & (mask < mask_end)
    if axis == 1:
        mask = mask.unsqueeze(-1)
    if mask_end - mask_start >= mask_param:
        raise ValueError("the mask is wider than mask_param")
    return specgram.masked_fill(mask, 0.0)


@torch.compile(backend="eager")
def augment(spec):
    spec = mask_along_axis(spec, 8, 1)
    spec = mask_along_axis(spec, 6, 2)
    return spec.log1p()


torch.manual_seed(0)
for _ in range(3):
    augment(torch.rand(2, 20, 30))
