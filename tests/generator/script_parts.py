"""The parts of generated training scripts.

A part is what a user adds to a plain loop: a kind of model, a scheduler, an average, a log. Its
fields are lines of the script, by the place where they go (:mod:`composer`). Names that all parts
share: ``run``, ``x``, ``dataset``, ``network`` (the plain module), ``model`` (wrapped),
``optimizer``, ``loader``; in a step ``epoch``, ``i``, ``inputs``, ``targets``, ``prediction`` and
``loss``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from textwrap import dedent


@dataclass(frozen=True, kw_only=True)
class Part:
    """Lines of a script, by their place."""

    kind: str
    name: str
    needs: tuple[str, ...] = ()  # all of these properties, given by other parts
    gives: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()  # names, kinds or properties
    imports: str = ""
    define: str = ""  # classes and functions, before the job is joined
    build: str = ""  # models and optimizers, after it
    tracked: str = ""  # keyword arguments of run.track
    loader: str = ""
    train_start: str = ""
    epoch_start: str = ""
    step_start: str = ""
    loss: str = ""
    gradients: str = ""
    step: str = ""
    outer: str = ""  # the loop over epochs; EPOCH is replaced
    head: str = ""  # of the loop over steps; BODY is replaced
    body: str = ""  # of a step; LOSS, GRADIENTS, STEP and AFTER are replaced
    after_update: str = ""
    step_end: str = ""  # after the body of a step
    epoch_end: str = ""
    result: str = ""  # entries of a dict
    draws_by_rank: bool = False  # random numbers that depend on the number of ranks
    is_shardable: bool = False  # works on DTensors, too
    open_in: tuple[str, ...] = ()  # ways of sharding in which its results are not exact yet
    wrap: str = "model = run.wrap(network)"  # of a model; of a sharded one, if there is no other
    sharded_wrap: str = ""

    @property
    def label(self) -> str:
        """Kind and name, as in the note of a script and on the command line."""
        return f"{self.kind}:{self.name}"

    def lines(self, place: str) -> list[str]:
        """The lines of a place, without common indentation."""
        text: str = getattr(self, place)
        return dedent(text).strip("\n").splitlines()


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
"""


def _net(forward: str, *, init: str = "", more: str = "") -> str:
    """The class Net with a forward method, further lines of its constructor, and methods."""
    text = NET.strip("\n") + "\n"
    for line in dedent(init).strip("\n").splitlines():
        text += f"        {line}\n"
    for line in dedent(more).strip("\n").splitlines():
        text += f"    {line}\n" if line else "\n"
    text += "\n    def forward(self, inputs):\n"
    for line in dedent(forward).strip("\n").splitlines():
        text += f"        {line}\n"
    return text


PLAIN_LOSS = """
prediction = model(inputs)
loss = F.mse_loss(prediction, targets)
"""

MODELS = (
    Part(
        kind="model",
        name="plain",
        is_shardable=True,
        define=_net("return self.head(torch.tanh(self.body(inputs)))"),
        build="network = Net()",
        loss=PLAIN_LOSS,
    ),
    Part(
        kind="model",
        name="two outputs",
        excludes=("tensor parallel",),  # a rank has a part of the hidden layer
        is_shardable=True,
        define=_net(
            """
            hidden = torch.tanh(self.body(inputs))
            return self.head(hidden), hidden
            """
        ),
        build="network = Net()",
        loss="""
        prediction, hidden = model(inputs)
        loss = F.mse_loss(prediction, targets) + 0.01 * hidden.pow(2).mean()
        """,
    ),
    Part(
        kind="model",
        name="loss inside",
        is_shardable=True,
        define=_net(
            """
            prediction = self.head(torch.tanh(self.body(inputs)))
            if targets is None:
                return prediction
            return {"prediction": prediction, "loss": F.mse_loss(prediction, targets)}
            """
        ).replace("def forward(self, inputs)", "def forward(self, inputs, targets=None)"),
        build="network = Net()",
        loss="""
        output = model(inputs, targets)
        prediction, loss = output["prediction"], output["loss"]
        """,
    ),
    Part(
        kind="model",
        name="tied",
        excludes=("tensor parallel",),  # refused: parallelize_module unties it
        is_shardable=True,
        define=_net(
            """
            hidden = torch.tanh(self.body(inputs))
            return self.head(torch.tanh(self.again(F.linear(hidden, self.body.weight.t()))))
            """,
            init="""
            self.again = nn.Linear(4, 8)
            self.again.weight = self.body.weight
            """,
        ),
        build="network = Net()",
        loss=PLAIN_LOSS,
    ),
    Part(
        kind="model",
        name="unfrozen later",
        is_shardable=True,
        define=_net("return self.head(torch.tanh(self.body(inputs)))"),
        build="""
        network = Net()
        network.body.requires_grad_(False)
        """,
        # After an evaluation the root of an FSDP2 model is not resharded. torch then changes only
        # the unsharded parameters, and forgets it after one backward pass.
        epoch_start="""
        getattr(network, "reshard", int)()
        network.body.requires_grad_(epoch >= 1)
        """,
        loss=PLAIN_LOSS,
    ),
    Part(
        kind="model",
        name="frozen head",
        is_shardable=True,
        define=_net("return self.head(torch.tanh(self.body(inputs)))"),
        build="""
        network = Net()
        network.head.requires_grad_(False)
        """,
        loss=PLAIN_LOSS,
    ),
    Part(
        kind="model",
        name="encoder and decoder",
        define="""
        class Encoder(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Linear(4, 8)

            def forward(self, inputs):
                return torch.tanh(self.body(inputs))
        """,
        build="""
        network = nn.ModuleDict({"encoder": Encoder(), "decoder": nn.Linear(8, 1)})
        """,
        wrap="""
        model = network
        encoder, decoder = run.wrap(model["encoder"]), run.wrap(model["decoder"])
        """,
        loss="""
        prediction = decoder(encoder(inputs))
        loss = F.mse_loss(prediction, targets)
        """,
        gives=("several wraps",),
    ),
    Part(
        kind="model",
        name="counting buffer",
        is_shardable=True,
        define=_net(
            """
            if self.training:
                self.calls += 1
            return self.head(torch.tanh(self.body(inputs))) / (1 + 0.01 * self.calls)
            """,
            init='self.register_buffer("calls", torch.zeros(()))',
        ),
        build="network = Net()",
        loss=PLAIN_LOSS,
    ),
    Part(
        kind="model",
        name="non-persistent buffer",
        define=_net(
            """
            if self.training:
                self.scale.mul_(0.9).add_(self.head.weight.detach().abs().mean(), alpha=0.1)
            return self.head(torch.tanh(self.body(inputs))) * self.scale
            """,
            init='self.register_buffer("scale", torch.ones(()), persistent=False)',
        ),
        build="network = Net()",
        loss=PLAIN_LOSS,
        result='"scale": network.scale',
    ),
    Part(
        kind="model",
        name="extra state",
        define=_net(
            """
            if self.training:
                self.temperature = 0.9 * self.temperature + 0.05
            return self.head(torch.tanh(self.body(inputs))) * self.temperature
            """,
            init="self.temperature = 1.0",
            more="""

            def get_extra_state(self):
                return {"temperature": self.temperature}

            def set_extra_state(self, state):
                self.temperature = state["temperature"]
            """,
        ),
        build="network = Net()",
        loss=PLAIN_LOSS,
        result='"temperature": network.temperature',
        gives=("extra state",),
    ),
    Part(
        kind="model",
        name="branch of every second step",
        define=_net(
            """
            hidden = torch.tanh(self.body(inputs))
            if self.has_branch:
                hidden = hidden + torch.tanh(self.branch(inputs))
            return self.head(hidden)
            """,
            init="self.branch, self.has_branch = nn.Linear(4, 8), True",
        ),
        build="network = Net()",
        wrap="model = run.wrap(network, find_unused_parameters=True)",
        step_start="network.has_branch = (epoch + i) % 2 == 0",
        loss=PLAIN_LOSS,
        # has_branch is no state: in an evaluation, a replacement has another value.
        excludes=("accumulated over batches", "evaluation"),
    ),
    Part(
        kind="model",
        name="embedding",
        is_shardable=True,
        define="""
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 1)

            def forward(self, inputs):
                tokens = (inputs * 4).long().clamp(-8, 7) + 8
                return self.head(torch.tanh(self.table(tokens).sum(1)))
        """,
        build="network = Net()",
        loss=PLAIN_LOSS,
        excludes=("tensor parallel",),
    ),
    Part(
        kind="model",
        name="recomputed",
        imports="from torch.utils.checkpoint import checkpoint",
        define=_net(
            """
            hidden = checkpoint(self.hidden, inputs, use_reentrant=False)
            return self.head(hidden)
            """,
            more="""

            def hidden(self, inputs):
                return torch.tanh(self.body(inputs))
            """,
        ),
        build="network = Net()",
        loss=PLAIN_LOSS,
    ),
    Part(
        kind="model",
        name="weight norm",
        imports="from torch.nn.utils.parametrizations import weight_norm",
        define=_net("return self.head(torch.tanh(self.body(inputs)))"),
        build="""
        network = Net()
        network.body = weight_norm(network.body)
        """,
        loss=PLAIN_LOSS,
    ),
    Part(
        kind="model",
        name="spectral norm",
        imports="from torch.nn.utils.parametrizations import spectral_norm",
        define=_net("return self.head(torch.tanh(self.body(inputs)))"),
        build="""
        network = Net()
        network.body = spectral_norm(network.body)
        """,
        loss=PLAIN_LOSS,
    ),
    Part(
        kind="model",
        name="forward hook",
        define=_net("return self.head(torch.tanh(self.body(inputs)))", init="self.gain = Gain()")
        + '''

class Gain(nn.Module):
    """Scales the hidden layer by a factor that it adapts in every forward pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("gain", torch.ones(()))

    def hook(self, module, args, output):
        if module.training:
            self.gain.mul_(0.98)
        return output * self.gain
''',
        build="""
        network = Net()
        network.body.register_forward_hook(network.gain.hook)
        """,
        loss=PLAIN_LOSS,
    ),
    Part(
        kind="model",
        name="gradient hooks",
        define=_net("return self.head(torch.tanh(self.body(inputs)))"),
        build="""
        network = Net()
        network.head.weight.register_hook(lambda gradient: 0.5 * gradient)
        """,
        loss=PLAIN_LOSS,
    ),
    Part(
        kind="model",
        name="loss in an attribute",
        excludes=("tensor parallel",),  # a rank has a part of the hidden layer
        is_shardable=True,
        define=_net(
            """
            hidden = torch.tanh(self.body(inputs))
            self.auxiliary = hidden.pow(2).mean()
            return self.head(hidden)
            """
        ),
        build="network = Net()",
        loss="""
        prediction = model(inputs)
        loss = F.mse_loss(prediction, targets) + 0.1 * network.auxiliary
        """,
    ),
    Part(
        kind="model",
        name="loss by a method",
        is_shardable=True,
        needs=("fsdp",),
        imports="from torch.distributed.fsdp import register_fsdp_forward_method",
        define=_net(
            "return self.head(torch.tanh(self.body(inputs)))",
            more="""

            def training_step(self, inputs, targets):
                prediction = self(inputs)
                return prediction, F.mse_loss(prediction, targets)
            """,
        ),
        build="network = Net()",
        sharded_wrap='register_fsdp_forward_method(network, "training_step")',
        loss="prediction, loss = model.training_step(inputs, targets)",
    ),
    Part(
        kind="model",
        name="container of sharded modules",
        is_shardable=True,
        needs=("build",),
        build="""
        network = nn.ModuleDict({"body": nn.Linear(4, 8), "head": nn.Linear(8, 1)})
        """,
        loss="""
        prediction = model["head"](torch.tanh(model["body"](inputs)))
        loss = F.mse_loss(prediction, targets)
        """,
    ),
    Part(
        kind="model",
        name="statistics over all ranks",
        define=_net(
            "return self.head(torch.tanh(self.body(inputs - self.center)))",
            init='self.register_buffer("center", torch.zeros(()))',
        ),
        build="network = Net()",
        step_start="""
        center = run.mean(len(inputs), center=inputs.mean())["center"]
        network.center.lerp_(torch.tensor(center), 0.2)
        """,
        loss=PLAIN_LOSS,
        excludes=("micro-batches",),  # whose inputs come later
    ),
    Part(
        kind="model",
        name="parameters of two widths",
        define=_net(
            "return self.head(torch.tanh(self.body(inputs.float())).double())",
            init="self.body.float()",
        ),
        build="network = Net()",
        loss=PLAIN_LOSS,
        gives=("float32",),
    ),
    Part(
        kind="model",
        name="dropout",
        define=_net(
            """
            return self.head(F.dropout(torch.tanh(self.body(inputs)), 0.2, self.training))
            """
        ),
        build="network = Net()",
        loss=PLAIN_LOSS,
        draws_by_rank=True,
    ),
)


def _torch_optimizer(name: str, made: str) -> Part:
    return Part(
        kind="optimizer",
        name=name,
        build=f"optimizer = {made}",
        step="optimizer.step()",
        gives=("torch optimizer", "torch closure"),
        is_shardable=True,
    )


OPTIMIZERS = (
    replace(
        _torch_optimizer("sgd", "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"),
        gives=("torch optimizer", "torch closure", "momentum"),
    ),
    _torch_optimizer(
        "nesterov",
        "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True)",
    ),
    _torch_optimizer("adam", "torch.optim.Adam(model.parameters(), lr=0.02)"),
    _torch_optimizer(
        "amsgrad", "torch.optim.Adam(model.parameters(), lr=0.02, amsgrad=True, foreach=True)"
    ),
    _torch_optimizer("adamw", "torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)"),
    _torch_optimizer("nadam", "torch.optim.NAdam(model.parameters(), lr=0.02)"),
    _torch_optimizer("rmsprop", "torch.optim.RMSprop(model.parameters(), lr=0.005)"),
    _torch_optimizer("radam", "torch.optim.RAdam(model.parameters(), lr=0.02)"),
    _torch_optimizer("adamax", "torch.optim.Adamax(model.parameters(), lr=0.02)"),
    _torch_optimizer("adadelta", "torch.optim.Adadelta(model.parameters(), lr=1.0)"),
    _torch_optimizer("asgd", "torch.optim.ASGD(model.parameters(), lr=0.05, t0=3)"),
    _torch_optimizer("fused adam", "torch.optim.Adam(model.parameters(), lr=0.02, fused=True)"),
    _torch_optimizer("adagrad", "torch.optim.Adagrad(model.parameters(), lr=0.05)"),
    Part(
        kind="optimizer",
        name="two groups",
        is_shardable=True,
        build="""
        last = list(model.parameters())[-2:]
        first = list(model.parameters())[:-2]
        optimizer = torch.optim.AdamW([{"params": first}, {"params": last, "lr": 0.03}], lr=0.01)
        """,
        step="optimizer.step()",
        gives=("torch optimizer", "torch closure"),
    ),
    Part(
        kind="optimizer",
        name="two optimizers",
        build="""
        last = list(model.parameters())[-2:]
        first = list(model.parameters())[:-2]
        optimizer = torch.optim.Adam(first, lr=0.01)
        head_optimizer = torch.optim.SGD(last, lr=0.05, momentum=0.9)
        """,
        tracked="head_optimizer=head_optimizer",
        step="""
        optimizer.step()
        head_optimizer.step()
        head_optimizer.zero_grad()
        """,
        result='**leaves("head_optimizer", head_optimizer.state_dict())',
        gives=("torch optimizer",),
    ),
    Part(
        kind="optimizer",
        name="decay after super",
        is_shardable=True,
        define="""
        class DecayingSGD(torch.optim.SGD):
            @torch.no_grad()
            def step(self, closure=None):
                super().step()
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(1 - 0.02)
        """,
        build="optimizer = DecayingSGD(model.parameters(), lr=0.05, momentum=0.9)",
        step="optimizer.step()",
        gives=("torch optimizer",),
    ),
    Part(
        kind="optimizer",
        name="step hook decays",
        is_shardable=True,
        define="""
        def decay(optimizer, args, kwargs):
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(0.98)
        """,
        build="""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(decay)
        """,
        step="optimizer.step()",
        gives=("torch optimizer",),
    ),
    Part(
        kind="optimizer",
        name="counts in state",
        is_shardable=True,
        define="""
        class Warming(torch.optim.Optimizer):
            def __init__(self, parameters, lr):
                super().__init__(parameters, {"lr": lr})

            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        state = self.state[parameter]
                        state["step"] = state.get("step", 0) + 1
                        if parameter.grad is not None:
                            rate = group["lr"] * min(1, state["step"] / 8)
                            parameter.sub_(parameter.grad, alpha=rate)
        """,
        build="optimizer = Warming(model.parameters(), lr=0.2)",
        step="optimizer.step()",
        gives=("torch optimizer",),
    ),
    Part(
        kind="optimizer",
        name="writes to groups",
        define="""
        class Adapting(torch.optim.Optimizer):
            def __init__(self, parameters, lr):
                super().__init__(parameters, {"lr": lr, "d": 0.0, "k": 0})

            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    used = [p for p in group["params"] if p.grad is not None]
                    squares = sum(float(p.grad.pow(2).sum()) for p in used)
                    if squares == 0:
                        return
                    group["d"] = 0.9 * group["d"] + 0.1 * squares
                    group["k"] += 1
                    for parameter in used:
                        parameter.sub_(parameter.grad, alpha=group["lr"] / (1 + group["d"]))
        """,
        build="optimizer = Adapting(model.parameters(), lr=0.1)",
        step="optimizer.step()",
        gives=("torch optimizer",),
    ),
    Part(
        kind="optimizer",
        name="values of its own",
        define="""
        class Normalized(torch.optim.SGD):
            # Divides gradients by a running mean of their norm, which it saves beside its state.
            scale = 1.0

            @torch.no_grad()
            def step(self, closure=None):
                used = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
                norm = float(torch.stack([p.grad.norm() for p in used]).norm())
                self.scale = 0.8 * self.scale + 0.2 * norm
                for parameter in used:
                    parameter.grad.div_(self.scale)
                super().step()

            def state_dict(self):
                return {**super().state_dict(), "scale": self.scale}

            def load_state_dict(self, state):
                state = dict(state)
                self.scale = state.pop("scale")
                super().load_state_dict(state)
        """,
        build="optimizer = Normalized(model.parameters(), lr=0.05, momentum=0.5)",
        step="optimizer.step()",
        gives=("torch optimizer",),
        excludes=("accumulated over batches",),
    ),
    Part(
        kind="optimizer",
        name="wrapper with an average",
        define="""
        class Averaging:
            # Wraps any optimizer and keeps its own average of the weights and a count.
            def __init__(self, optimizer):
                self.optimizer, self.count = optimizer, 0
                self.parameters = [p for g in optimizer.param_groups for p in g["params"]]
                self.average = [p.detach().clone() for p in self.parameters]

            @torch.no_grad()
            def step(self):
                self.optimizer.step()
                self.count += 1
                for average, parameter in zip(self.average, self.parameters):
                    average.lerp_(parameter, 1 / self.count)
                    parameter.lerp_(average, 0.1)

            def state_dict(self):
                own = {"count": self.count, "average": self.average}
                return {"base": self.optimizer.state_dict(), **own}

            def load_state_dict(self, state):
                self.optimizer.load_state_dict(state["base"])
                self.count = state["count"]
                for average, value in zip(self.average, state["average"]):
                    average.copy_(value)
        """,
        build="""
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        averaging = Averaging(optimizer)
        """,
        tracked="averaging=averaging",
        step="averaging.step()",
        result='**leaves("averaging", averaging.state_dict())',
        gives=("wrapper",),
    ),
    Part(
        kind="optimizer",
        name="noam",
        define="""
        class NoamOpt:
            # Of the Annotated Transformer: counts steps and sets the rate.
            def __init__(self, size, factor, warmup, optimizer):
                self.optimizer, self.size, self.factor = optimizer, size, factor
                self.warmup, self._step = warmup, 0

            def step(self):
                self._step += 1
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate()
                self.optimizer.step()

            def rate(self):
                least = min(self._step**-0.5, self._step * self.warmup**-1.5)
                return self.factor * self.size**-0.5 * least

            def state_dict(self):
                return {"step": self._step, "optimizer": self.optimizer.state_dict()}

            def load_state_dict(self, state):
                self._step = state["step"]
                self.optimizer.load_state_dict(state["optimizer"])
        """,
        build="""
        optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
        noam = NoamOpt(64, 0.5, 8, optimizer)
        """,
        tracked="noam=noam",
        step="noam.step()",
        result='"noam": noam._step',
        gives=("wrapper",),
        excludes=("scheduler",),
    ),
    Part(
        kind="optimizer",
        name="schedule-free",
        define="""
        class ScheduleFree(torch.optim.Optimizer):
            def __init__(self, parameters, lr=0.1, momentum=0.9):
                super().__init__(parameters, {"lr": lr, "momentum": momentum, "k": 0, "on": False})

            @torch.no_grad()
            def eval(self):
                for group in self.param_groups:
                    if group["on"]:
                        for p in group["params"]:
                            if "z" in self.state[p]:
                                p.lerp_(end=self.state[p]["z"], weight=1 - 1 / group["momentum"])
                        group["on"] = False

            @torch.no_grad()
            def train(self):
                for group in self.param_groups:
                    if not group["on"]:
                        for p in group["params"]:
                            if "z" in self.state[p]:
                                p.lerp_(end=self.state[p]["z"], weight=1 - group["momentum"])
                        group["on"] = True

            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    part = 1 / (group["k"] + 1)
                    for p in group["params"]:
                        if p.grad is None:
                            continue
                        if "z" not in self.state[p]:
                            self.state[p]["z"] = p.clone()
                        z = self.state[p]["z"]
                        p.lerp_(end=z, weight=part)
                        p.add_(p.grad, alpha=group["lr"] * (group["momentum"] * (1 - part) - 1))
                        z.sub_(p.grad, alpha=group["lr"])
                    group["k"] += 1
        """,
        build="optimizer = ScheduleFree(model.parameters())",
        epoch_start="optimizer.train()",
        step="optimizer.step()",
        epoch_end="optimizer.eval()",
        gives=("torch optimizer", "swaps"),
        excludes=("scheduler",),
    ),
)

SCHEDULERS = (
    Part(
        kind="scheduler",
        name="step by epoch",
        is_shardable=True,
        build="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)",
        tracked="scheduler=scheduler",
        epoch_end="scheduler.step()",
    ),
    Part(
        kind="scheduler",
        name="at the epoch's beginning",
        is_shardable=True,
        build="scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)",
        tracked="scheduler=scheduler",
        epoch_start="scheduler.step()",
        gives=("changes at the epoch's beginning",),
    ),
    Part(
        kind="scheduler",
        name="lambda by step",
        is_shardable=True,
        build="""
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / 8))
        """,
        tracked="scheduler=scheduler",
        after_update="scheduler.step()",
    ),
    Part(
        kind="scheduler",
        name="sequential",
        is_shardable=True,
        imports="from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR",
        build="""
        warmup = LinearLR(optimizer, start_factor=0.1, total_iters=4)
        cosine = CosineAnnealingLR(optimizer, T_max=20)
        scheduler = SequentialLR(optimizer, [warmup, cosine], milestones=[4])
        """,
        tracked="scheduler=scheduler",
        after_update="scheduler.step()",
    ),
    Part(
        kind="scheduler",
        name="one cycle",
        is_shardable=True,
        build="""
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
        """,
        tracked="scheduler=scheduler",
        after_update="scheduler.step()",
        needs=("momentum",),
    ),
    Part(
        kind="scheduler",
        name="warm restarts by fraction",
        is_shardable=True,
        build="""
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2)
        """,
        tracked="scheduler=scheduler",
        after_update="scheduler.step(epoch + i / len(loader))",
    ),
    Part(
        kind="scheduler",
        name="own before the update",
        define="""
        class Decay:
            # Sets the rate of the coming update.
            def __init__(self, optimizer):
                self.optimizer, self.count = optimizer, 0
                self.rate = optimizer.param_groups[0]["lr"]

            def step(self):
                self.count += 1
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate * 0.9**self.count

            def state_dict(self):
                return {"count": self.count}

            def load_state_dict(self, state):
                self.count = state["count"]
        """,
        build="decay_rate = Decay(optimizer)",
        tracked="decay_rate=decay_rate",
        gradients="decay_rate.step()",
        result='"decay": decay_rate.count',
    ),
    Part(
        kind="scheduler",
        name="plateau by step",
        is_shardable=True,
        build="""
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.8, patience=1, threshold=0.05
        )
        """,
        tracked="scheduler=scheduler",
        after_update="""
        scheduler.step(run.mean(len(inputs), loss=loss.detach())["loss"])
        """,
        gives=("collective after the update",),
    ),
    Part(
        kind="scheduler",
        name="plateau by epoch",
        build="""
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.3
        )
        """,
        tracked="scheduler=scheduler",
        epoch_end="""
        with torch.no_grad():
            error = (sum(p.pow(2).sum() for p in model.parameters())).item()
        scheduler.step(run.mean(1, error=error)["error"])
        """,
        gives=("collective at the epoch's end",),
    ),
    Part(
        kind="scheduler",
        name="own",
        is_shardable=True,
        define="""
        class Warmup:
            def __init__(self, optimizer, steps):
                self.optimizer, self.steps, self.count = optimizer, steps, 0
                self.rates = [group["lr"] for group in optimizer.param_groups]

            def step(self):
                self.count += 1
                for group, rate in zip(self.optimizer.param_groups, self.rates):
                    group["lr"] = rate * min(1, self.count / self.steps)

            def state_dict(self):
                return {"count": self.count}

            def load_state_dict(self, state):
                self.count = state["count"]
        """,
        build="warmup = Warmup(optimizer, steps=10)",
        tracked="warmup=warmup",
        after_update="warmup.step()",
        result='"warmup": warmup.count',
    ),
    Part(
        kind="scheduler",
        name="own by metric",
        is_shardable=True,
        define="""
        class HalveOnRise:
            # Lowers the rate when the running mean of the loss does not fall.
            def __init__(self, optimizer):
                self.optimizer, self.mean, self.least = optimizer, None, float("inf")

            def step(self, loss):
                self.mean = loss if self.mean is None else 0.7 * self.mean + 0.3 * loss
                if self.mean > 0.97 * self.least:
                    for group in self.optimizer.param_groups:
                        group["lr"] *= 0.9
                self.least = min(self.least, self.mean)

            def state_dict(self):
                return {"mean": self.mean, "least": self.least}

            def load_state_dict(self, state):
                self.mean, self.least = state["mean"], state["least"]
        """,
        build="halving = HalveOnRise(optimizer)",
        tracked="halving=halving",
        after_update='halving.step(run.mean(len(inputs), loss=loss.detach())["loss"])',
        result='"least": halving.least',
        gives=("collective after the update",),
    ),
    Part(
        kind="scheduler",
        name="by hand",
        is_shardable=True,
        train_start='run.state.setdefault("updates", 0)',
        step_start="""
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * 0.95 ** run.state["updates"]
        """,
        after_update='run.state["updates"] += 1',
        gives=("sets rates",),
    ),
)

AVERAGES = (
    Part(
        kind="average",
        name="ema module",
        imports="import copy",
        build="ema = copy.deepcopy(network).requires_grad_(False)",
        tracked="ema=ema",
        after_update="""
        with torch.no_grad():
            for average, parameter in zip(ema.parameters(), network.parameters()):
                average.lerp_(parameter, 0.1)
        """,
        result='**leaves("ema", ema.state_dict())',
        excludes=("model:weight norm", "model:spectral norm", "model:forward hook"),
    ),
    Part(
        kind="average",
        name="averaged model",
        imports="from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn",
        build="ema = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9))",
        tracked="ema=ema",
        after_update="ema.update_parameters(network)",
        result='**leaves("ema", ema.state_dict())',
        excludes=("model:weight norm", "model:spectral norm", "model:forward hook", "extra state"),
    ),
    Part(
        kind="average",
        name="ema by data, swapped in for evaluation",
        define="""
        class EMA:
            def __init__(self, model):
                self.model, self.backup = model, {}
                self.shadow = {n: p.data.clone() for n, p in model.named_parameters()}

            def update(self):
                for name, parameter in self.model.named_parameters():
                    self.shadow[name] = 0.1 * parameter.data + 0.9 * self.shadow[name]

            def apply_shadow(self):
                for name, parameter in self.model.named_parameters():
                    self.backup[name] = parameter.data
                    parameter.data = self.shadow[name]

            def restore(self):
                for name, parameter in self.model.named_parameters():
                    parameter.data = self.backup[name]
                self.backup = {}

            def state_dict(self):
                return {"shadow": self.shadow}

            def load_state_dict(self, state):
                self.shadow = dict(state["shadow"])
        """,
        build="ema = EMA(network)",
        tracked="ema=ema",
        after_update="ema.update()",
        epoch_end="""
        ema.apply_shadow()
        with torch.no_grad():
            norm = sum(p.abs().sum() for p in network.parameters())
        run.mean(1, norm=norm)
        ema.restore()
        """,
        result='**leaves("ema", ema.state_dict())',
        gives=("swaps", "collective at the epoch's end"),
        excludes=("optimizer:schedule-free",),
    ),
    Part(
        kind="average",
        name="second sharded model",
        is_shardable=True,
        needs=("sharded",),
        build="",
        tracked="ema=ema",
        after_update="""
        with torch.no_grad():
            for average, parameter in zip(ema.parameters(), model.parameters()):
                average.lerp_(parameter, 0.1)
        """,
        result='**leaves("ema", ema.state_dict())',
    ),
    Part(
        kind="average",
        name="swa at epochs' ends",
        imports="from torch.optim.swa_utils import AveragedModel",
        build="swa = AveragedModel(model)",
        tracked="swa=swa",
        epoch_end="swa.update_parameters(model)",
        result='**leaves("swa", swa.state_dict())',
        excludes=("model:weight norm", "model:spectral norm", "model:forward hook", "extra state"),
    ),
    Part(
        kind="average",
        name="best weights",
        imports="import copy",
        build="""
        best = copy.deepcopy(network).requires_grad_(False)
        """,
        tracked="best=best",
        train_start='run.state.setdefault("best loss", 1e9)',
        after_update="""
        mean = run.mean(len(inputs), loss=loss.detach())["loss"]
        if mean < run.state["best loss"]:
            run.state["best loss"] = mean
            best.load_state_dict(network.state_dict())
        """,
        result='**leaves("best", best.state_dict()), "best loss": run.state["best loss"]',
        gives=("collective after the update",),
        excludes=("model:weight norm", "model:spectral norm", "model:forward hook"),
    ),
    Part(
        kind="average",
        name="swapped in by load_state_dict",
        imports="import copy",
        build="ema = copy.deepcopy(network).requires_grad_(False)",
        tracked="ema=ema",
        after_update="""
        with torch.no_grad():
            for average, parameter in zip(ema.parameters(), network.parameters()):
                average.lerp_(parameter, 0.2)
        """,
        epoch_end="""
        kept = copy.deepcopy(network.state_dict())
        network.load_state_dict(ema.state_dict())
        run.mean(1, norm=sum(p.detach().abs().sum() for p in network.parameters()))
        network.load_state_dict(kept)
        """,
        result='**leaves("ema", ema.state_dict())',
        gives=("swaps", "collective at the epoch's end"),
        excludes=("model:weight norm", "model:spectral norm", "model:forward hook"),
    ),
    Part(
        kind="average",
        name="lookahead",
        imports="import copy",
        build="slow = [p.detach().clone() for p in network.parameters()]",
        define="""
        class Tensors:
            # A list of tensors as something to track.
            def __init__(self, tensors):
                self.tensors = tensors

            def state_dict(self):
                return {"tensors": self.tensors}

            def load_state_dict(self, state):
                for mine, other in zip(self.tensors, state["tensors"]):
                    mine.copy_(other)
        """,
        tracked="slow=Tensors(slow)",
        train_start='run.state.setdefault("fast steps", 0)',
        after_update="""
        run.state["fast steps"] += 1
        if run.state["fast steps"] % 3 == 0:
            with torch.no_grad():
                for mine, parameter in zip(slow, network.parameters()):
                    mine.lerp_(parameter, 0.5)
                    parameter.copy_(mine)
        """,
        result='**leaves("slow", slow)',
    ),
    Part(
        kind="average",
        name="after_step callback",
        imports="import copy",
        build="""
        ema = copy.deepcopy(network).requires_grad_(False)


        def update_average(step):
            with torch.no_grad():
                for average, parameter in zip(ema.parameters(), network.parameters()):
                    average.lerp_(parameter, 0.1)


        run.after_step(update_average)
        """,
        tracked="ema=ema",
        result='**leaves("ema", ema.state_dict())',
        excludes=(
            "model:weight norm",
            "model:spectral norm",
            "model:forward hook",
        ),
    ),
)

UPDATES = (
    Part(
        kind="update",
        name="plain",
        is_shardable=True,
        body="""
        optimizer.zero_grad()
        LOSS
        loss.backward()
        GRADIENTS
        STEP
        AFTER
        """,
    ),
    Part(
        kind="update",
        name="zero_grad at the end",
        is_shardable=True,
        body="""
        LOSS
        loss.backward()
        GRADIENTS
        STEP
        optimizer.zero_grad()
        AFTER
        """,
    ),
    Part(
        kind="update",
        name="accumulated over batches",
        is_shardable=True,
        body="""
        LOSS
        (loss / 2).backward()
        if (i + 1) % 2 == 0 or i + 1 == len(loader):
            GRADIENTS
            STEP
            optimizer.zero_grad()
            AFTER
        """,
        gives=("accumulated over batches",),
        excludes=("tensor parallel",),  # refused: its gradients are summed once in a step
    ),
    Part(
        kind="update",
        name="accumulated under no_sync",
        imports="from contextlib import nullcontext",
        body="""
        is_last = (i + 1) % 3 == 0 or i + 1 == len(loader)
        with nullcontext() if is_last else model.no_sync():
            LOSS
            (loss / 3).backward()
        if is_last:
            GRADIENTS
            STEP
            optimizer.zero_grad()
            AFTER
        """,
        gives=("accumulated over batches",),
        excludes=("several wraps",),
    ),
    Part(
        kind="update",
        name="two losses, gradients kept by reference",
        body="""
        optimizer.zero_grad()
        LOSS
        loss.backward()
        first_pass = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        LOSS
        (0.5 * loss + 0.1 * prediction.pow(2).mean()).backward()
        for parameter, gradient in zip(model.parameters(), first_pass):
            if gradient is not None:
                parameter.grad += 0.3 * gradient
        GRADIENTS
        STEP
        AFTER
        """,
    ),
    Part(
        kind="update",
        name="sam",
        body="""
        optimizer.zero_grad()
        LOSS
        loss.backward()
        moved = [p for p in model.parameters() if p.grad is not None]
        before = [p.detach().clone() for p in moved]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in moved]).norm()
            for parameter in moved:
                parameter.add_(parameter.grad * (0.05 / norm))
        optimizer.zero_grad()
        LOSS
        loss.backward()
        for parameter, value in zip(moved, before):
            parameter.data = value
        GRADIENTS
        STEP
        AFTER
        """,
        gives=("assigns data",),
    ),
    Part(
        kind="update",
        name="gan",
        build="""
        critic = run.wrap(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
        critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9))
        """,
        tracked="critic_optimizer=critic_optimizer",
        body="""
        LOSS
        critic_optimizer.zero_grad()
        (critic(prediction.detach()).mean() - critic(targets).mean()).backward()
        critic_optimizer.step()
        optimizer.zero_grad()
        loss = loss - 0.1 * critic(prediction).mean()
        loss.backward()
        GRADIENTS
        STEP
        AFTER
        """,
        result="""
        **leaves("critic", critic.state_dict()),
        **leaves("critic_optimizer", critic_optimizer.state_dict())
        """,
    ),
    Part(
        kind="update",
        name="scaled loss",
        build="""
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
        """,
        tracked="scaler=scaler",
        body="""
        optimizer.zero_grad()
        LOSS
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        GRADIENTS
        scaler.step(optimizer)
        scaler.update()
        AFTER
        """,
        result='"scale": scaler.get_scale()',
        needs=("torch optimizer",),
        excludes=("optimizer:two optimizers", "optimizer:decay after super"),
    ),
    Part(
        kind="update",
        name="critic twice as often",
        build="""
        critic = run.wrap(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))
        critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.005)
        """,
        tracked="critic_optimizer=critic_optimizer",
        body="""
        optimizer.zero_grad()
        LOSS
        for _ in range(2):
            critic_optimizer.zero_grad()
            (critic(prediction.detach()).mean() - critic(targets).mean()).backward()
            critic_optimizer.step()
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.3, 0.3)
        (loss - 0.1 * critic(prediction).mean()).backward()
        GRADIENTS
        STEP
        AFTER
        """,
        result="""
        **leaves("critic", critic.state_dict()),
        **leaves("critic_optimizer", critic_optimizer.state_dict())
        """,
    ),
    Part(
        kind="update",
        name="two updates in a step",
        body="""
        for _ in range(2):
            optimizer.zero_grad()
            LOSS
            loss.backward()
            GRADIENTS
            STEP
        AFTER
        """,
    ),
    Part(
        kind="update",
        name="micro-batches",
        body="""
        optimizer.zero_grad()
        for inputs, targets in step:
            LOSS
            step.backward(loss)
        GRADIENTS
        STEP
        AFTER
        """,
        needs=("steps",),
        gives=("micro-batches",),
        excludes=(
            "gradients:mean before the update",
            "scheduler:warm restarts by fraction",
            "equal weights",
        ),
    ),
    Part(
        kind="update",
        name="batches of a step read ahead",
        imports="from contextlib import nullcontext",
        body="""
        optimizer.zero_grad()
        batches = list(step)
        for number, (inputs, targets) in enumerate(batches, start=1):
            with model.no_sync() if number < len(batches) else nullcontext():
                LOSS
                (loss * loader.share.mean_weights[number - 1]).backward()
        GRADIENTS
        STEP
        AFTER
        """,
        needs=("steps",),
        gives=("micro-batches",),
        excludes=(
            "gradients:mean before the update",
            "scheduler:warm restarts by fraction",
            "several wraps",
        ),
    ),
    Part(
        kind="update",
        name="loss normalised over all ranks",
        is_shardable=True,
        body="""
        optimizer.zero_grad()
        LOSS
        (loss * loader.share.mean_weights[0]).backward()
        GRADIENTS
        STEP
        AFTER
        """,
        needs=("equal weights",),
        gives=("weighted by shares",),
    ),
    Part(
        kind="update",
        name="mixup",
        body="""
        optimizer.zero_grad()
        weight, mixed = torch.rand(()), torch.randperm(len(inputs))
        inputs = weight * inputs + (1 - weight) * inputs[mixed]
        targets = weight * targets + (1 - weight) * targets[mixed]
        LOSS
        loss.backward()
        GRADIENTS
        STEP
        AFTER
        """,
        draws_by_rank=True,
    ),
    Part(
        kind="update",
        name="gradients decayed instead of zeroed",
        is_shardable=True,
        body="""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        LOSS
        loss.backward()
        GRADIENTS
        STEP
        AFTER
        """,
        excludes=("optimizer:two optimizers", "several wraps"),
    ),
    Part(
        kind="update",
        name="every third step skipped",
        body="""
        optimizer.zero_grad()
        LOSS
        if (epoch + i) % 3 == 2:
            continue
        loss.backward()
        GRADIENTS
        STEP
        AFTER
        """,
    ),
    Part(
        kind="update",
        name="factors of python's and numpy's generators",
        imports="import random\nimport numpy",
        body="""
        optimizer.zero_grad()
        inputs = inputs * (1 + 0.1 * random.random()) + 0.1 * numpy.random.rand()
        LOSS
        loss.backward()
        GRADIENTS
        STEP
        AFTER
        """,
        draws_by_rank=True,
    ),
    Part(
        kind="update",
        name="closure",
        body="""
        LOSS


        def closure():
            optimizer.zero_grad()
            loss.backward()
            GRADIENTS
            return loss


        optimizer.step(closure)
        AFTER
        """,
        needs=("torch closure",),
    ),
)

EPOCHS = (
    Part(
        kind="epochs",
        name="run.epochs",
        is_shardable=True,
        outer="""
        for epoch in run.epochs(EPOCHS):
            EPOCH
        """,
        gives=("run.epochs",),
    ),
    Part(
        kind="epochs",
        name="run.epochs, left",
        is_shardable=True,
        outer="""
        for epoch in run.epochs(EPOCHS + 2):
            EPOCH
            if epoch + 1 == EPOCHS:
                break
        """,
        gives=("run.epochs", "leaves epochs"),
    ),
    Part(
        kind="epochs",
        name="counted in the state",
        is_shardable=True,
        outer="""
        run.state.setdefault("epoch", 0)
        while run.state["epoch"] < EPOCHS:
            epoch = run.state["epoch"]
            EPOCH
            run.state["epoch"] += 1
        """,
        result='"epoch": run.state["epoch"]',
    ),
    Part(
        kind="epochs",
        name="counted in the state before their ends",
        is_shardable=True,
        outer="""
        run.state.setdefault("epoch", 0)
        while (epoch := run.state["epoch"]) < EPOCHS:
            EPOCH
        """,
        epoch_end='run.state["epoch"] += 1',
        result='"epoch": run.state["epoch"]',
    ),
    Part(
        kind="epochs",
        name="a range from the state",
        is_shardable=True,
        outer="""
        for epoch in range(run.state.setdefault("epoch", 0), EPOCHS):
            EPOCH
            run.state["epoch"] = epoch + 1
        """,
        result='"epoch": run.state["epoch"]',
    ),
    Part(
        kind="epochs",
        name="until a target of steps",
        is_shardable=True,
        outer="""
        run.state.setdefault("epoch", 0)
        run.state.setdefault("done", 0)
        while run.state["done"] < TARGET:
            epoch = run.state["epoch"]
            EPOCH
            run.state["epoch"] += 1
        """,
        step_end="""
        run.state["done"] += 1
        if run.state["done"] == TARGET:
            break
        """,
        define="TARGET = 10",
        result='"epoch": run.state["epoch"], "done": run.state["done"]',
    ),
    Part(
        kind="epochs",
        name="none",
        is_shardable=True,
        outer="""
        epoch = 0
        EPOCH
        """,
        needs=("endless",),
        gives=("no epochs",),
    ),
)

# A loop that is left early goes on in the same epoch, unless run.epochs begins the next one.
LOOPS = (
    Part(
        kind="loop",
        name="enumerate",
        is_shardable=True,
        head="""
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            BODY
        """,
    ),
    Part(
        kind="loop",
        name="next",
        is_shardable=True,
        head="""
        batches = iter(loader)
        for i in range(loader.index, len(loader)):
            inputs, targets = next(batches)
            BODY
        """,
        gives=("holds its iterator",),
    ),
    Part(
        kind="loop",
        name="run.steps",
        head="""
        for step in run.steps(loader):
            i = step.index
            BODY
        """,
        gives=("steps",),
        needs=("micro-batches",),
    ),
    Part(
        kind="loop",
        name="left in the last step",
        is_shardable=True,
        head="""
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            BODY
            if i + 1 == len(loader):
                break
        """,
        gives=("ends after the body",),
    ),
    Part(
        kind="loop",
        name="left in the middle",
        is_shardable=True,
        head="""
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            BODY
            if i == 2:
                break
        """,
        gives=("ends after the body",),
    ),
    Part(
        kind="loop",
        name="left before an update",
        is_shardable=True,
        head="""
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            if i == 3:
                break
            BODY
        """,
        needs=("run.epochs",),  # otherwise the next pass begins with this batch
    ),
    Part(
        kind="loop",
        name="left by a mean, or exhausted",
        is_shardable=True,
        train_start='run.state.setdefault("exhausted", 0)',
        head="""
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            BODY
            if run.mean(len(inputs), loss=loss.detach())["loss"] < 1.2:
                break
        else:
            run.state["exhausted"] += 1
        """,
        result='"exhausted": run.state["exhausted"]',
        gives=(
            "ends after the body",
            "collective after the update",
        ),
    ),
    Part(
        kind="loop",
        name="left by a count in the state",
        is_shardable=True,
        train_start='run.state.setdefault("updates in all", 0)',
        head="""
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            BODY
            run.state["updates in all"] += 1
            if run.state["updates in all"] % 3 == 0:
                break
        """,
        result='"updates in all": run.state["updates in all"]',
        gives=("ends after the body",),
    ),
    Part(
        kind="loop",
        name="next, left in the middle",
        is_shardable=True,
        head="""
        batches = iter(loader)
        for i in range(loader.index, len(loader)):
            inputs, targets = next(batches)
            BODY
            if i == 2:
                break
        """,
        gives=(
            "holds its iterator",
            "ends after the body",
        ),
    ),
    Part(
        kind="loop",
        name="next, of a shorter range",
        is_shardable=True,
        head="""
        batches = iter(loader)
        for i in range(loader.index, min(3, len(loader))):
            inputs, targets = next(batches)
            BODY
        """,
        gives=(
            "holds its iterator",
            "ends after the body",
        ),
        excludes=("epochs:until a target of steps",),  # its passes end at the same index: endless
    ),
    Part(
        kind="loop",
        name="next until none is left",
        is_shardable=True,
        head="""
        batches = iter(loader)
        while (batch := next(batches, None)) is not None:
            i, (inputs, targets) = loader.index, batch
            BODY
        """,
        gives=("holds its iterator",),
    ),
    Part(
        kind="loop",
        name="next of an attribute",
        is_shardable=True,
        define="""
        class Batches:
            pass
        """,
        head="""
        Batches.iterator = iter(loader)
        for i in range(loader.index, len(loader)):
            inputs, targets = next(Batches.iterator)
            BODY
        """,
        gives=("holds its iterator",),
    ),
    Part(
        kind="loop",
        name="islice",
        is_shardable=True,
        imports="import itertools",
        head="""
        for inputs, targets in itertools.islice(loader, 3):
            i = loader.index
            BODY
        """,
        needs=("run.epochs",),
    ),
    Part(
        kind="loop",
        name="islice of the rest",
        is_shardable=True,
        imports="import itertools",
        head="""
        for inputs, targets in itertools.islice(loader, 3 - loader.index):
            i = loader.index
            BODY
        """,
        needs=("run.epochs",),
        gives=("ends after the body",),
    ),
    Part(
        kind="loop",
        name="zip with a range",
        is_shardable=True,
        head="""
        for i, (inputs, targets) in zip(range(loader.index, 3), loader):
            BODY
        """,
        needs=("run.epochs",),
        gives=("ends after the body",),
    ),
    Part(
        kind="loop",
        name="generator of the script",
        is_shardable=True,
        define="""
        def first_batches(loader, n):
            for i, batch in enumerate(loader, start=loader.index):
                if i == n:
                    return
                yield i, batch
        """,
        head="""
        for i, (inputs, targets) in first_batches(loader, 3):
            BODY
        """,
        needs=("run.epochs",),
    ),
    Part(
        kind="loop",
        name="left by return",
        head="""
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            BODY
            if epoch == 2 and i == 1:
                return
        """,
        gives=(
            "ends after the body",
            "returns",
        ),
        excludes=("sharded", "update:every third step skipped"),
    ),
    Part(
        kind="loop",
        name="endless generator",
        is_shardable=True,
        define="""
        def endless(loader):
            while True:
                yield from loader
        """,
        train_start='run.state.setdefault("done", 0)',
        head="""
        batches = endless(loader)
        while run.state["done"] < 10:
            inputs, targets = next(batches)
            i = loader.index
            BODY
            run.state["done"] += 1
        """,
        needs=("no epochs",),
        gives=(
            "holds its iterator",
            "ends after the body",
            "endless",
        ),
        result='"done": run.state["done"]',
    ),
    Part(
        kind="loop",
        name="next of one iterator after the other",
        is_shardable=True,
        train_start='run.state.setdefault("done", 0)',
        head="""
        batches = iter(loader)
        while True:
            try:
                inputs, targets = next(batches)
            except StopIteration:
                batches = iter(loader)
                inputs, targets = next(batches)
            i = loader.index
            BODY
            run.state["done"] += 1
            if run.state["done"] >= 10:
                break
        """,
        needs=("no epochs",),
        gives=(
            "holds its iterator",
            "ends after the body",
            "endless",
        ),
        excludes=("update:every third step skipped",),  # `continue` would skip the end
        result='"done": run.state["done"]',
    ),
)

GRADIENTS = (
    Part(
        kind="gradients",
        name="clip norm",
        is_shardable=True,
        gradients="nn.utils.clip_grad_norm_(model.parameters(), 0.5)",
    ),
    Part(
        kind="gradients",
        name="clip by history",
        train_start='run.state.setdefault("norms", [])',
        gradients="""
        limit = sorted(run.state["norms"])[len(run.state["norms"]) // 2] if i else 10.0
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        run.state["norms"].append(norm.item())
        """,
        result='"norms": sum(run.state["norms"])',
        excludes=("accumulated over batches",),
    ),
    Part(
        kind="gradients",
        name="clip by running norm",
        define="""
        class RunningClip:
            def __init__(self):
                self.norm = 0.0

            def __call__(self, parameters):
                parameters = list(parameters)
                norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
                self.norm = 0.9 * self.norm + 0.1 * float(norm) if self.norm else float(norm)
                nn.utils.clip_grad_norm_(parameters, 0.8 * self.norm)

            def state_dict(self):
                return {"norm": self.norm}

            def load_state_dict(self, state):
                self.norm = state["norm"]
        """,
        build="clip = RunningClip()",
        tracked="clip=clip",
        gradients="clip(model.parameters())",
        result='"clip": clip.norm',
    ),
    Part(
        kind="gradients",
        name="centralised",
        gradients="""
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.dim() > 1:
                parameter.grad -= parameter.grad.mean(1, keepdim=True)
        """,
    ),
    Part(
        kind="gradients",
        name="noise from a generator of the step",
        gradients="""
        generator = torch.Generator().manual_seed(1000 * epoch + i)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad += 0.01 * torch.randn(parameter.shape, generator=generator)
        """,
        excludes=("float32",),
    ),
    Part(
        kind="gradients",
        name="noise from tracked generators",
        imports="""
        import random
        import numpy as np
        """,
        build="""
        draws = random.Random(3)
        noise = np.random.default_rng(4)
        generator = torch.Generator().manual_seed(5)
        """,
        tracked="draws=draws, noise=noise, generator=generator",
        gradients="""
        scale = 0.01 * draws.random() * float(noise.normal())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad += scale * torch.randn(parameter.shape, generator=generator)
        """,
        excludes=("float32", "noise from a generator of the step"),
    ),
    Part(
        kind="gradients",
        name="rate set by a hook of the optimizer",
        build="""
        def follow_norm(optimizer, args, kwargs):
            used = [p.grad for g in optimizer.param_groups for p in g["params"]]
            norm = nn.utils.get_total_norm([g for g in used if g is not None])
            for group in optimizer.param_groups:
                group["lr"] = 0.9 * group["lr"] + 0.1 * 0.05 / (1 + float(norm))


        optimizer.register_step_pre_hook(follow_norm)
        """,
        needs=("torch optimizer",),
        excludes=("scheduler", "optimizer:two optimizers"),
    ),
    Part(
        kind="gradients",
        name="clip value",
        gradients="nn.utils.clip_grad_value_(model.parameters(), 0.05)",
    ),
    Part(
        kind="gradients",
        name="mean before the update",
        is_shardable=True,
        train_start='run.state.setdefault("running loss", 1.0)',
        gradients="""
        mean = run.mean(len(inputs), loss=loss.detach())["loss"]
        run.state["running loss"] = 0.9 * run.state["running loss"] + 0.1 * mean
        """,
        result='"running loss": run.state["running loss"]',
        excludes=("update:closure",),
    ),
)

LOGS = (
    Part(
        kind="log",
        name="mean after every update",
        is_shardable=True,
        after_update="run.mean(len(inputs), loss=loss.detach())",
        gives=("collective after the update",),
    ),
    Part(
        kind="log",
        name="mean every third step",
        is_shardable=True,
        after_update="""
        if i % 3 == 0:
            run.mean(len(inputs), loss=loss.detach())
        """,
        gives=("collective after the update",),
        excludes=("accumulated over batches",),
    ),
    Part(
        kind="log",
        name="running mean of the loss",
        is_shardable=True,
        train_start='run.state.setdefault("average loss", 0.0)',
        after_update="""
        mean = run.mean(len(inputs), loss=loss.detach())["loss"]
        run.state["average loss"] = 0.8 * run.state["average loss"] + 0.2 * mean
        """,
        result='"average loss": run.state["average loss"]',
        gives=("collective after the update",),
    ),
    Part(
        kind="log",
        name="barrier after the update",
        is_shardable=True,
        imports="import torch.distributed as dist",
        after_update="""
        if dist.is_initialized():
            dist.barrier()
        """,
        gives=("collective after the update",),
    ),
    Part(
        kind="log",
        name="all_reduce after the update",
        imports="import torch.distributed as dist",
        after_update="""
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        """,
        gives=("collective after the update",),
    ),
    Part(
        kind="log",
        name="run.log of means every second step",
        after_update="""
        if i % 2 == 0:
            run.log(**run.mean(len(inputs), loss=loss.detach()))
        """,
        gives=("collective after the update",),
        excludes=("accumulated over batches",),
    ),
    Part(
        kind="log",
        name="sums with the gradients",
        train_start='run.state.setdefault("summed", {"loss": 0.0, "samples": 0.0})',
        loss="""
        sums = run.sum_with_gradients(loss=loss.detach() * len(inputs), samples=len(inputs))
        """,
        gradients="""
        for name, total in sums.items():
            run.state["summed"][name] += total
        """,
        result='**leaves("summed", run.state["summed"])',
        excludes=(  # they compute LOSS outside of steps
            "evaluation:each epoch",
            "between:once at the epoch's end",
            "between:once at the epoch's end, with a place",
            "between:once after a commit at the epoch's end",
        ),
    ),
    Part(
        kind="log",
        name="sums every third step, given after the update",
        train_start='run.state.setdefault("late", 0.0)',
        after_update="""
        if i % 3 == 0:
            late = run.sum_with_gradients(samples=len(inputs))
            run.state["late"] += 1
        """,
        result='"late": run.state["late"]',
        gives=("collective after the update",),
        excludes=("update:accumulated over batches",),
    ),
    Part(
        kind="log",
        name="run.log",
        is_shardable=True,
        after_update="run.log(loss=loss.detach())",
    ),
)

STATES = (
    Part(
        kind="state",
        name="counter",
        is_shardable=True,
        train_start='run.state.setdefault("steps", 0)',
        after_update='run.state["steps"] += 1',
        result='"counted": run.state["steps"]',
    ),
    Part(
        kind="state",
        name="nested values kept outside",
        build="""
        history = run.state.setdefault("history", {"seen": 0, "norms": []})
        norms = history["norms"]
        """,
        after_update="""
        history["seen"] += 1
        norms.append(sum(p.detach().pow(2).sum().item() for p in model.parameters()))
        """,
        result="""
        "seen": run.state["history"]["seen"],
        "kept": history["seen"],
        "last": sum(run.state["history"]["norms"][-3:])
        """,
    ),
    Part(
        kind="state",
        name="list in a closure",
        is_shardable=True,
        define="""
        def noting(entries):
            def note(entry):
                entries.append(entry)

            return note
        """,
        train_start='note = noting(run.state.setdefault("notes", []))',
        after_update="note(100 * epoch + i)",
        epoch_end="note(-epoch)",
        result='"notes": torch.tensor(run.state["notes"])',
    ),
    Part(
        kind="state",
        name="attributes of a trainer",
        define="""
        class Trainer:
            def __init__(self):
                self.global_step, self.rates = 0, {"last": 0.0, "epochs": []}

            def update_ended(self, optimizer):
                self.global_step += 1
                self.rates["last"] = optimizer.param_groups[0]["lr"]

            def epoch_ended(self, epoch):
                self.rates["epochs"].append((epoch, self.global_step))

            def state_dict(self):
                return vars(self)

            def load_state_dict(self, state):
                vars(self).update(state)
        """,
        build="trainer = Trainer()",
        tracked="trainer=trainer",
        after_update="trainer.update_ended(optimizer)",
        epoch_end="trainer.epoch_ended(epoch)",
        result="""
        "trainer": trainer.global_step,
        "last rate": trainer.rates["last"],
        "steps at ends": torch.tensor(trainer.rates["epochs"])
        """,
    ),
    Part(
        kind="state",
        name="index in the step",
        is_shardable=True,
        train_start='run.state.setdefault("indices", [])',
        after_update='run.state["indices"].append(loader.index)',
        result='"indices": torch.tensor(run.state["indices"])',
    ),
    Part(
        kind="state",
        name="index after the loop",
        is_shardable=True,
        train_start='run.state.setdefault("last indices", [])',
        epoch_end='run.state["last indices"].append(loader.index)',
        result='"last indices": torch.tensor(run.state["last indices"])',
        excludes=("holds its iterator",),  # refused: its step has not ended
    ),
    Part(
        kind="state",
        name="variable of the last step, after an evaluation",
        train_start='run.state.setdefault("sums at ends", [])',
        after_update="last_sum = sum(float(p.sum()) for p in network.parameters())",
        epoch_end="""
        run.mean(1, evaluated=1.0)
        run.state["sums at ends"].append(last_sum)
        """,
        result='"sums at ends": torch.tensor(run.state["sums at ends"])',
        # A finished job that is started again repeats the code after the loop, without the loop.
        # The last of three batches need not end an accumulation, which assigns the variable.
        excludes=("run.epochs, left", "islice", "islice of the rest"),
    ),
    Part(
        kind="state",
        name="types of the standard library",
        imports="from collections import Counter, defaultdict",
        define="""
        class Statistics:
            def __init__(self):
                self.counts, self.sums = Counter(), defaultdict(float)

            def add(self, name, value):
                self.counts[name] += 1
                self.sums[name] += value

            def state_dict(self):
                return {"counts": self.counts, "sums": self.sums}

            def load_state_dict(self, state):
                self.counts, self.sums = state["counts"], state["sums"]
        """,
        build="statistics = Statistics()",
        tracked="statistics=statistics",
        after_update="""
        statistics.add(f"epoch {epoch}", sum(float(p.sum()) for p in network.parameters()))
        """,
        result='**leaves("statistics", statistics.state_dict())',
    ),
    Part(
        kind="state",
        name="meter of one rank",
        define="""
        class Meter:
            def __init__(self):
                self.begun, self.samples, self.sum = [], 0, torch.zeros(())

            def state_dict(self):
                return {"begun": self.begun, "samples": self.samples, "sum": self.sum}

            def load_state_dict(self, state):
                self.begun, self.samples, self.sum = state.values()
        """,
        build="""
        meter = Meter()
        run.track(meter=meter, local=True)
        """,
        step_start="meter.begun.append(100 * loader.position.epoch + i)",
        loss="""
        meter.samples += len(inputs)
        meter.sum += len(inputs)
        """,
        result="""
        "counted twice": len(meter.begun) - len(set(meter.begun)),
        "torn": meter.samples - int(meter.sum)
        """,
    ),
    Part(
        kind="state",
        name="long log",
        define="""
        class Log:
            def __init__(self):
                self.entries = []

            def add(self, norm):
                self.entries += [{"norm": norm, "number": n, "edits": 0} for n in range(60)]
                self.entries[len(self.entries) // 3]["edits"] += 1

            def state_dict(self):
                return {"entries": self.entries}

            def load_state_dict(self, state):
                self.entries = state["entries"]
        """,
        build="log = Log()",
        tracked="log=log",
        after_update="log.add(sum(float(p.detach().pow(2).sum()) for p in network.parameters()))",
        result="""
        "entries": len(log.entries),
        "edits": sum(n * entry["edits"] for n, entry in enumerate(log.entries)),
        "norms": sum(entry["norm"] for entry in log.entries)
        """,
    ),
    Part(
        kind="state",
        name="window of weights",
        imports="from collections import deque",
        define="""
        class Window:
            # The last three weights of a layer, and the damping that it derives from them.
            def __init__(self):
                self.tensors = deque(maxlen=3)

            def add(self, tensor):
                self.tensors.append(tensor.detach().clone())

            def mean(self):
                return torch.stack(list(self.tensors)).mean(0)

            def state_dict(self):
                return {"tensors": list(self.tensors)}

            def load_state_dict(self, state):
                self.tensors = deque(state["tensors"], maxlen=3)
        """,
        build="window = Window()",
        tracked="window=window",
        after_update="""
        bias = next(p for p in network.parameters() if p.dim() == 1)
        window.add(bias)
        with torch.no_grad():
            bias.lerp_(window.mean(), 0.3)
        """,
        result='**leaves("window", window.state_dict())',
    ),
    Part(
        kind="state",
        name="factor drawn at the epoch's beginning",
        epoch_start="factor = 1 + 0.2 * torch.rand(()).item()",
        step_start="inputs = factor * inputs",
        needs=("run.epochs",),  # which seeds the generators
        draws_by_rank=True,
        excludes=("micro-batches",),
    ),
    Part(
        kind="state",
        name="tensors in run.state",
        train_start="""
        if "total" not in run.state:
            run.state["total"] = torch.zeros(8)
        """,
        after_update="""
        largest = max(network.parameters(), key=lambda p: p.numel())
        run.state["total"] += largest.detach().reshape(-1)[:8]
        """,
        result='"total of weights": run.state["total"]',
        excludes=("float32",),
    ),
    Part(
        kind="state",
        name="group kept outside",
        build="head_group = optimizer.param_groups[-1]",
        after_update='head_group["lr"] *= 0.97',
        needs=("torch optimizer",),
        excludes=("scheduler",),
    ),
    Part(
        kind="state",
        name="groups kept outside",
        build="groups = optimizer.param_groups",
        after_update="""
        for group in groups:
            group["lr"] = max(0.001, group["lr"] - 0.002)
        """,
        needs=("torch optimizer",),
        excludes=("scheduler", "state:group kept outside"),
    ),
    Part(
        kind="state",
        name="large tracked object",
        define="""
        class Adaptive:
            # A coefficient beside a frozen reference of 160 KB.
            def __init__(self, network):
                self.coefficient, self.reference = 1.0, torch.ones(20_000)

            def step(self):
                self.coefficient *= 0.95

            def state_dict(self):
                return {"coefficient": self.coefficient, "reference": self.reference}

            def load_state_dict(self, state):
                self.coefficient = state["coefficient"]
                self.reference.copy_(state["reference"])
        """,
        build="adaptive = Adaptive(network)",
        tracked="adaptive=adaptive",
        after_update="adaptive.step()",
        gradients="""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= adaptive.coefficient
        """,
        result='"coefficient": adaptive.coefficient',
    ),
    Part(
        kind="state",
        name="non-persistent buffer of a tracked module",
        define="""
        class Meter(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("total", torch.zeros(()), persistent=False)
                self.register_buffer("count", torch.zeros(()))
        """,
        build="meter = Meter()",
        tracked="meter=meter",
        after_update="""
        meter.count += 1
        meter.total += sum(p.detach().sum() for p in model.parameters())
        """,
        result='"total": meter.total, "count": meter.count',
    ),
)

CHANGES = (
    Part(
        kind="change",
        name="initialised in the training function",
        train_start="""
        torch.manual_seed(1)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.bias.data, 0.0, 0.1)
        """,
    ),
    Part(
        kind="change",
        name="clamped by data",
        after_update="""
        for parameter in model.parameters():
            parameter.data.clamp_(-0.8, 0.8)
        """,
    ),
    Part(
        kind="change",
        name="scaled by data once in an epoch",
        after_update="""
        if i == 3:
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.9
        """,
        excludes=("accumulated over batches",),
    ),
    Part(
        kind="change",
        name="permuted by data",
        after_update="""
        bias = next(p for p in network.parameters() if p.dim() == 1)
        bias.data = bias.data.roll(1)
        """,
    ),
    Part(
        kind="change",
        name="noise from a generator of the step",
        after_update="""
        generator = torch.Generator().manual_seed(1000 * epoch + i)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
        """,
        excludes=("float32",),
    ),
    Part(
        kind="change",
        name="sign flipped by data",
        after_update="""
        if i % 2:
            bias = next(p for p in network.parameters() if p.dim() == 1)
            bias.data = -bias.data
        """,
        excludes=("accumulated over batches",),
    ),
    Part(
        kind="change",
        name="through numpy",
        after_update="""
        for parameter in model.parameters():
            parameter.detach().numpy()[...] *= 0.98
        """,
    ),
    Part(
        kind="change",
        name="initialised in the training function, all weights",
        train_start="""
        torch.manual_seed(2)
        for parameter in network.parameters():
            nn.init.normal_(parameter, 0.0, 0.3)
        """,
    ),
    Part(
        kind="change",
        name="hooks registered in the training function",
        train_start="""
        for module in network.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda module, args, output: 0.9 * output)
        """,
    ),
    Part(
        kind="change",
        name="settings changed in the training function",
        imports="from types import SimpleNamespace",
        build="settings = SimpleNamespace(shrinkage=0.04, factors=[])",
        train_start="""
        settings.shrinkage /= 2
        settings.factors.append(1 - settings.shrinkage)
        """,
        after_update="""
        for parameter in model.parameters():
            parameter.data.mul_(sum(settings.factors))
        """,
        result='"shrinkage": settings.shrinkage',
    ),
    Part(
        kind="change",
        name="from one vector",
        imports="from torch.nn.utils import parameters_to_vector, vector_to_parameters",
        after_update="""
        vector = parameters_to_vector(model.parameters())
        vector_to_parameters(0.99 * vector.detach(), model.parameters())
        """,
        excludes=("float32", "model:tied"),
    ),
    Part(
        kind="change",
        name="averaged over ranks by hand",
        imports="import torch.distributed as dist",
        after_update="""
        if i % 3 == 1 and dist.is_initialized():
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()
        """,
        excludes=("accumulated over batches",),
        gives=("collective after the update",),
    ),
    Part(
        kind="change",
        name="views of one buffer",
        build="""
        flat = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
        offset = 0
        for parameter in network.parameters():
            parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        """,
        after_update="flat.mul_(0.99)",
        excludes=("float32", "sam", "swaps", "assigns data", "model:tied", "change"),
    ),
    Part(
        kind="change",
        name="optimizer state damped",
        after_update="""
        for state in optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value) and value.dim() > 0:
                    value.mul_(0.7)
        """,
        excludes=("optimizer:schedule-free",),
    ),
    Part(
        kind="change",
        name="an attribute of a layer, at an epoch",
        build="""
        layer = next(part for part in network.modules() if isinstance(part, nn.Linear))
        layer.gain = 1.0
        layer.register_forward_hook(lambda part, inputs, output: output * part.gain)
        """,
        epoch_start="""
        if epoch == 1:
            layer.gain = 0.5
        """,
    ),
    Part(
        kind="change",
        name="in place without data",
        is_shardable=True,
        after_update="""
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
        """,
    ),
)

EVALUATIONS = (
    Part(
        kind="evaluation",
        name="each epoch",
        is_shardable=True,
        build="""
        held_out = TensorDataset(x[:17], targets_of(x[:17]))
        test_loader = run.shard(DataLoader(held_out, batch_size=4))
        """,
        epoch_end="""
        model.eval()
        error, seen = 0.0, 0
        with torch.no_grad():
            for inputs, targets in test_loader:
                LOSS
                error, seen = error + loss.item() * len(inputs), seen + len(inputs)
        model.train()
        run.state[f"error {epoch}"] = run.mean(seen, error=error / max(1, seen))["error"]
        """,
        result='"last error": run.state.get(f"error {EPOCHS - 1}", 0.0)',
        gives=("collective at the epoch's end",),
    ),
    Part(
        kind="evaluation",
        name="within the epoch",
        build="""
        held_out = TensorDataset(x[:17], targets_of(x[:17]))
        test_loader = run.shard(DataLoader(held_out, batch_size=4))
        """,
        after_update="""
        if i == 2:
            model.eval()
            error, seen = 0.0, 0
            with torch.no_grad():
                for some, expected in test_loader:
                    error = error + F.mse_loss(network(some), expected).item() * len(some)
                    seen = seen + len(some)
            model.train()
            run.state["error"] = run.mean(seen, error=error / max(1, seen))["error"]
        """,
        result='"error": run.state["error"]',
        gives=("collective after the update",),
        excludes=(
            "several wraps",
            "model:two outputs",
            "accumulated over batches",
        ),
    ),
    Part(
        kind="evaluation",
        name="early stopping",
        train_start='run.state.setdefault("least norm", 1e9)',
        epoch_end="""
        norm = sum(float(p.detach().abs().max()) for p in network.parameters())
        norm = run.mean(1, norm=norm)["norm"]
        if norm > 1.02 * run.state["least norm"]:
            break
        run.state["least norm"] = min(norm, run.state["least norm"])
        """,
        result='"least norm": run.state["least norm"]',
        gives=("collective at the epoch's end", "leaves epochs"),
        excludes=("swaps", "no epochs"),
    ),
)

# A world also determines which samples are in the first micro-batch of a step.
DEPENDS_ON_MICRO_BATCHES = (
    "log:running mean of the loss",  # of the last one
    "model:counting buffer",
    "model:non-persistent buffer",
    "model:extra state",
    "model:forward hook",
    "model:spectral norm",
    "model:statistics over all ranks",
)

EXAMINE = """
        run.state.setdefault("examined", 0)
        run.state.setdefault("least", 1e9)
        run.state.setdefault("waits", 0)
        run.state.setdefault("last", 0.0)
"""
# The function of run.once: it changes the state, and communicates in the middle.
EXAMINED = """
        def examine():
            inputs, targets = x[:12], targets_of(x[:12])
            run.state["examined"] += 1
            model.eval()
            with torch.no_grad():
                LOSS
            model.train()
            value = run.mean(1, value=loss.detach())["value"]
            run.state["waits"] = 0 if value < run.state["least"] else run.state["waits"] + 1
            run.state["least"] = min(value, run.state["least"])
            return value


"""
RESULT_OF_EXAMINE = """
        "examined": run.state["examined"], "least": run.state["least"],
        "waits": run.state["waits"], "last": run.state["last"]
"""
BETWEEN = (
    Part(
        kind="between",
        name="commit in the step",
        is_shardable=True,
        step_end="""
        run.commit()
        run.mean(1, step=i)
        """,
        excludes=("ends after the body",),  # refused: a break after run.commit()
    ),
    Part(
        kind="between",
        name="once at the epoch's end",
        is_shardable=True,
        train_start=EXAMINE,
        epoch_end=EXAMINED
        + """
        run.state["last"] = run.once("examine", examine)
        run.mean(1, epoch=epoch)
        run.state["last"] += run.once("examine", examine)
        """,
        result=RESULT_OF_EXAMINE,
        gives=("collective at the epoch's end",),
        excludes=("model:branch of every second step",),
    ),
    Part(
        kind="between",
        name="once at the epoch's end, with a place",
        is_shardable=True,
        train_start=EXAMINE,
        epoch_end=EXAMINED
        + """
        run.state["last"] = run.once("examine", examine, at=epoch)
        run.mean(1, epoch=epoch)
        """,
        result=RESULT_OF_EXAMINE,
        gives=("collective at the epoch's end",),
        excludes=("model:branch of every second step",),
    ),
    Part(
        kind="between",
        name="once after a commit at the epoch's end",
        is_shardable=True,
        train_start=EXAMINE,
        epoch_end=EXAMINED
        + """
        run.commit()
        run.state["last"] = run.once("examine", examine)
        run.mean(1, epoch=epoch)
        """,
        result=RESULT_OF_EXAMINE,
        gives=("collective at the epoch's end",),
        excludes=(
            "loop:next, left in the middle",
            "loop:next, of a shorter range",
            "epochs:until a target of steps",  # refused where the iterator is held
            "endless",
            "model:branch of every second step",
        ),
    ),
    Part(
        kind="between",
        name="commit at the epoch's end",
        is_shardable=True,
        epoch_end="""
        run.commit()
        run.mean(1, epoch=epoch)
        """,
        gives=("collective at the epoch's end",),
        excludes=(
            "loop:next, left in the middle",
            "loop:next, of a shorter range",
            "epochs:until a target of steps",  # refused where the iterator is held
            "endless",
        ),
    ),
    Part(
        kind="between",
        name="once before the loop",
        is_shardable=True,
        train_start="""
        run.state.setdefault("heads", [])
        run.once("start", lambda: run.state["heads"].append(-1))
        """,
        epoch_start="""
        run.once("epoch", lambda: run.state["heads"].append(epoch))
        """,
        result='"heads": torch.tensor(run.state["heads"])',
    ),
    Part(
        kind="between",
        name="once in a callback",
        train_start=EXAMINE,
        build="""
        seen = []


        def examine():
            run.state["examined"] += 1
            norm = sum(float(p.detach().abs().sum()) for p in network.parameters())
            return run.mean(1, norm=norm)["norm"]


        def examine_some(step):
            if step.number % 3 != 1:
                return
            value = run.once("examine", examine)
            run.state["least"] = min(value, run.state["least"])
            run.state["last"] = value


        run.after_step(examine_some)
        """,
        result=RESULT_OF_EXAMINE,
        excludes=("swaps",),
    ),
    Part(
        kind="between",
        name="once if it is due",
        train_start=EXAMINE
        + """
        run.state.setdefault("due", -1)


        def examine():
            run.state["examined"] += 1
            run.state["waits"] = run.state["due"]
            run.state["due"] = -1
            norm = sum(float(p.detach().abs().sum()) for p in network.parameters())
            norm = run.mean(1, norm=norm)["norm"]
            run.state["least"] = min(norm, run.state["least"])
            run.state["last"] = norm
            return norm


        """,
        epoch_start="""
        if run.state["due"] >= 0:
            run.once("examine", examine, at=run.state["due"])
        """,
        step_start="""
        if i in (1, 2):
            run.state["due"] = 10 * epoch + i
        """,
        step_end="""
        run.commit()
        if run.state["due"] >= 0:
            run.once("examine", examine, at=run.state["due"])
        """,
        result=RESULT_OF_EXAMINE,
        excludes=(
            "ends after the body",
            "update:accumulated over batches",
            "update:every third step skipped",
        ),
    ),
    Part(
        kind="between",
        name="once with averaged weights",
        imports="import copy",
        train_start=EXAMINE,
        build="""
        best = copy.deepcopy(network).requires_grad_(False)
        """,
        tracked="best=best",
        epoch_end="""
        def examine():
            run.state["examined"] += 1
            norm = sum(float(p.detach().abs().sum()) for p in network.parameters())
            norm = run.mean(1, norm=norm)["norm"]
            if norm < run.state["least"]:
                run.state["least"] = norm
                best.load_state_dict(network.state_dict())
            return norm


        kept = copy.deepcopy(network.state_dict())
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(0.5)
        run.state["last"] = run.once("examine", examine)
        network.load_state_dict(kept)
        """,
        result=RESULT_OF_EXAMINE.rstrip() + ',\n        **leaves("best", best.state_dict())\n',
        gives=("swaps", "collective at the epoch's end"),
        excludes=(
            "model:weight norm",
            "model:spectral norm",
            "model:forward hook",
            "average:best weights",
        ),
    ),
)

DATA = (
    Part(
        kind="data",
        name="shuffled",
        is_shardable=True,
        loader="""
        loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
        """,
    ),
    Part(
        kind="data",
        name="uneven shares",
        is_shardable=True,
        loader="""
        loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=11)
        """,
    ),
    Part(
        kind="data",
        name="in order, last step dropped",
        is_shardable=True,
        loader="""
        loader = run.loader(DataLoader(dataset, batch_size=8, drop_last=True), global_batch=10)
        """,
    ),
    Part(
        kind="data",
        name="two samples in the last step",
        is_shardable=True,
        loader="""
        loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=14)
        """,
    ),
    Part(
        kind="data",
        name="weighted sampler",
        imports="from torch.utils.data import WeightedRandomSampler",
        loader="""
        sampler = WeightedRandomSampler([1.0 + n % 3 for n in range(44)], num_samples=40)
        loader = run.loader(DataLoader(dataset, batch_size=8, sampler=sampler), global_batch=10)
        """,
    ),
    Part(
        kind="data",
        name="data workers",
        loader="""
        loader = run.loader(
            DataLoader(dataset, batch_size=8, shuffle=True, num_workers=1), global_batch=12
        )
        """,
    ),
    Part(
        kind="data",
        name="noise of the data set",
        define="""
        class Noisy(torch.utils.data.Dataset):
            def __len__(self):
                return len(x)

            def __getitem__(self, index):
                return x[index] + 0.1 * torch.randn(4), targets_of(x[index : index + 1])[0]
        """,
        loader="""
        loader = run.loader(DataLoader(Noisy(), batch_size=8, shuffle=True), global_batch=12)
        """,
    ),
    Part(
        kind="data",
        name="given order",
        is_shardable=True,
        define="""
        def order(epoch):
            generator = torch.Generator().manual_seed(7 + epoch)
            indices = torch.randperm(44, generator=generator).tolist()
            return indices + indices[:1]
        """,
        loader="""
        loader = run.loader(
            DataLoader(dataset, batch_size=4, shuffle=True), order=order, global_batch=12
        )
        """,
    ),
    Part(
        kind="data",
        name="given batches",
        define="""
        def batches_of(epoch):
            generator = torch.Generator().manual_seed(7 + epoch)
            return [part.tolist() for part in torch.randperm(44, generator=generator).split(3)]
        """,
        loader="""
        loader = run.loader(
            DataLoader(dataset, batch_size=3), order=batches_of, global_batch=4
        )
        """,
    ),
    Part(
        kind="data",
        name="several micro-batches",
        loader="""
        loader = run.loader(
            DataLoader(dataset, batch_size=2, shuffle=True), micro_batches=2, global_batch=13
        )
        """,
        needs=("steps",),
        excludes=DEPENDS_ON_MICRO_BATCHES,
    ),
    Part(
        kind="data",
        name="two samples in the last step, equal weights",
        is_shardable=True,
        loader="""
        loader = run.loader(
            DataLoader(dataset, batch_size=8, shuffle=True), global_batch=14, weights="equal"
        )
        """,
        needs=("weighted by shares",),
        gives=("equal weights",),
    ),
    Part(
        kind="data",
        name="more micro-batches than samples, equal weights",
        loader="""
        loader = run.loader(
            DataLoader(dataset, batch_size=2, shuffle=True),
            micro_batches=6,
            global_batch=9,
            weights="equal",
        )
        """,
        needs=("update:batches of a step read ahead",),
        gives=("equal weights",),
        excludes=DEPENDS_ON_MICRO_BATCHES,
    ),
    Part(
        kind="data",
        name="max_steps",
        is_shardable=True,
        loader="""
        loader = run.loader(
            DataLoader(dataset, batch_size=8, shuffle=True), global_batch=9, max_steps=4
        )
        """,
    ),
)

# How often a script has none, one or two parts of each kind.
OPTIONAL: dict[str, tuple[tuple[Part, ...], tuple[float, float, float]]] = {
    "scheduler": (SCHEDULERS, (0.45, 0.55, 0.0)),
    "average": (AVERAGES, (0.6, 0.4, 0.0)),
    "gradients": (GRADIENTS, (0.55, 0.4, 0.05)),
    "log": (LOGS, (0.5, 0.45, 0.05)),
    "state": (STATES, (0.45, 0.45, 0.1)),
    "change": (CHANGES, (0.65, 0.35, 0.0)),
    "evaluation": (EVALUATIONS, (0.7, 0.3, 0.0)),
    "between": (BETWEEN, (0.65, 0.35, 0.0)),
}
REQUIRED: dict[str, tuple[Part, ...]] = {
    "model": MODELS,
    "optimizer": OPTIMIZERS,
    "update": UPDATES,
    "data": DATA,
    "epochs": EPOCHS,
    "loop": LOOPS,
}
DEFAULTS = {kind: parts[0] for kind, parts in REQUIRED.items()}


def all_parts() -> Iterator[Part]:
    """Every part, the required kinds first."""
    for parts in REQUIRED.values():
        yield from parts
    for parts, _ in OPTIONAL.values():
        yield from parts


BY_LABEL = {part.label: part for part in all_parts()}
