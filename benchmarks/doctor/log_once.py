"""torchtune #2771: which attention runs is logged once, through a helper that remembers what it said."""

import logging

import torch

log = logging.getLogger("model")


def log_once(text):
    if not hasattr(log, "said"):
        log.said = set()
    if text not in log.said:
        log.said.add(text)
        log.info(text)


@torch.compile(backend="eager")
def attend(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    log_once("attention is written out")
    return weights @ v


attend(*(torch.rand(2, 5, 8) for _ in "qkv"))
