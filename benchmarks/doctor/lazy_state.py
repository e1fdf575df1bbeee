"""Advanced_Optimizers #6: an optimizer makes its state at the first step and counts its steps."""

import torch


class Adamish:
    def __init__(self, params):
        self.params, self.state = params, {p: {} for p in params}

    @torch.no_grad()
    def step(self, lr=0.01):
        for p in self.params:
            state = self.state[p]
            if len(state) == 0:
                state["step"] = 0
                state["m"] = torch.zeros_like(p)
                state["v"] = torch.zeros_like(p)
            state["step"] += 1
            state["m"].lerp_(p.grad, 0.1)
            state["v"].lerp_(p.grad * p.grad, 0.001)
            bias1 = 1 - 0.9 ** state["step"]
            bias2 = 1 - 0.999 ** state["step"]
            p.sub_(lr * (state["m"] / bias1) / ((state["v"] / bias2).sqrt() + 1e-8))


torch.manual_seed(0)
w = torch.nn.Parameter(torch.randn(4, 4))
optimizer = Adamish([w])
step = torch.compile(optimizer.step, backend="eager")
for _ in range(5):
    w.grad = torch.randn(4, 4)
    step()
