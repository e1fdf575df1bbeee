"""torchrl-like environment: states that are done are reset in the step."""

import torch


class Env:
    def __init__(self, n):
        self.state = torch.zeros(n, 2)
        self.steps = torch.zeros(n)

    def reset(self, done):
        self.state[done] = torch.rand(int(done.sum()), 2)
        self.steps[done] = 0

    def step(self, action):
        self.state = self.state + 0.3 * action
        self.steps = self.steps + 1
        done = (self.state.norm(dim=-1) > 1) | (self.steps > 3)
        reward = -self.state.norm(dim=-1)
        if done.any():
            self.reset(done)
        return self.state, reward, done


torch.manual_seed(0)
env = Env(4)
step = torch.compile(env.step, backend="eager")
for _ in range(6):
    step(torch.randn(4, 2))
