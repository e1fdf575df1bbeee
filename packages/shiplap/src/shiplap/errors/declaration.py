"""Declarations: SL1xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class DeclarationError(ShiplapError, TypeError):
    """A declaration that no torch op can carry out (SL1xx)."""


class MissingValueError(DeclarationError, AttributeError):
    """A backward that reads a value which was not saved (SL135)."""


register(
    DeclarationError,
    [
        (
            "SL101",
            "the op name is not valid",
            (
                "A torch op is called namespace::name. Both parts must be Python identifiers, and the namespace "
                "must not belong to torch."
            ),
            'write @sl.op("namespace::name")',
        ),
        (
            "SL102",
            "an argument has no usable annotation",
            "Shiplap derives the op's schema, its argument checks and its fake implementation from the annotations.",
            'annotate the argument, for example x: Float[Tensor, "n c"] or stride: int = 1',
        ),
        (
            "SL103",
            "a torch schema cannot express this argument",
            (
                "The arguments of an op cross the dispatcher as tensors, numbers, strings, lists of these, and as "
                "dtypes, devices, layouts, memory formats and generators. Other Python objects have no type there."
            ),
            "pass the fields of the argument as separate arguments of these types",
        ),
        (
            "SL104",
            "the size of an output dim is not determined",
            (
                "A fake tensor needs the size of every output. The size of each output dim must therefore come from "
                "an input, an expression or an upper bound."
            ),
            (
                'give dims={"m": "<expression>"} if the size is computable, or the upper bound in '
                'bounds={"m": "<expression>"} if it depends on data'
            ),
        ),
        (
            "SL105",
            "a dim expression is not valid",
            "Shiplap evaluates dim expressions on symbolic sizes, where only a small set of operations is possible.",
            (
                "use names of dims and int arguments with + - * // %, comparisons, "
                "len prod min max cdiv gcd pow2 pow2ceil where broadcast"
            ),
        ),
        (
            "SL106",
            "the dtype of an output is not determined",
            (
                "A dtype class such as Float stands for several dtypes, and an output takes the one of an input "
                "with the same class."
            ),
            "use a concrete class (Float32, Int64, ...) or a class that an input also uses",
        ),
        (
            "SL107",
            "mutates= lists an argument that cannot be mutated",
            "An entry of mutates= must be the name of a tensor argument.",
            "name a tensor argument of the signature",
        ),
        (
            "SL108",
            "the op name is already taken",
            "Two different functions declare an op of the same name.",
            "rename one of the two ops; running the same definition again is allowed",
        ),
        (
            "SL109",
            "the return annotation does not describe the outputs",
            "Shiplap allocates the outputs from the return annotation.",
            'annotate "-> Float[Tensor, \\"n co\\"]", a tuple of such tensors, or "-> None" with mutates=',
        ),
        (
            "SL110",
            "the backward function does not fit the op",
            (
                "A backward function reads arguments and results of the op by their names, and returns one gradient "
                "for each argument that it names."
            ),
            "return a dict {argument name: gradient}; read and save arguments and outputs by their names",
        ),
        (
            "SL112",
            "the autocast rule is not known",
            "The rule says which dtype the floating-point inputs get under torch.autocast.",
            "use 'widest', 'autocast', 'float32' or None",
        ),
        (
            "SL113",
            "the declaration is not finished",
            (
                "'shiplap init' writes a draft with the names and types of an op. Only the author of the op knows the"
                " sizes of its outputs and the arguments that it mutates."
            ),
            "fill in the lines marked FILL, then write sl.op (or sl.adopt) in place of unfinished",
        ),
        (
            "SL114",
            "the template does not follow the rules for templates",
            (
                "Inductor inserts the code of neighbouring operations at the template's hooks. A template must "
                "therefore have one output, and store it through a hook."
            ),
            "change the place under 'got' to what 'expected' says",
        ),
        (
            "SL115",
            "the bucket rule does not fit the op",
            (
                "Calls of one bucket share a tuned choice. A bucket rule states, for dims and scalars of the op, "
                "which values fall into one bucket."
            ),
            'call op.buckets("pow2", k="exact") with names of its free dims and scalars',
        ),
        (
            "SL116",
            "the kernel has no valid config",
            "A config gives a value to each compile-time parameter. At least one config must fit the sizes.",
            'give configs=[{"BLOCK": 64}, ...] with keywords of the kernel, one of which fits every size',
        ),
        (
            "SL117",
            "calls cannot be joined along this dim",
            (
                "Shiplap joins several calls into one by concatenating tensors along this dim. Each argument that has "
                "the dim, and every output, must have it as one whole axis."
            ),
            "name a dim that is one whole axis of an argument and of every output",
        ),
        (
            "SL118",
            "the tolerance has no number or no reason",
            (
                "A declared tolerance permits a kernel to differ from its reference by more than rounding. Such a "
                "tolerance must state a relative error and a reason."
            ),
            'give tolerance=(1e-3, "tanh stands for erf")',
        ),
        (
            "SL119",
            "nondifferentiable= does not fit the op",
            (
                "An entry names a result that carries no gradient, or a tensor argument through which none flows. "
                "What an op writes to stays part of the graph that it belongs to."
            ),
            "name tensor arguments that the op does not write to, or results, as outputs= calls them",
        ),
        (
            "SL120",
            "random= does not fit the op",
            (
                "Random results are the same for the same seed. It comes from an int, an integer tensor or a generator "
                "among the arguments, or from torch's own generator, random='global'."
            ),
            "name the argument that seeds the op, or write random='global'",
        ),
        (
            "SL121",
            "unordered= does not fit the results",
            (
                "The entries name results whose rows, along the first dim, are a set: the audit compares them in any "
                "order. Several results are ordered together, row by row."
            ),
            "name results with a first dim that is the same for all",
        ),
        (
            "SL122",
            "the kernel does not fit the op",
            (
                "A kernel of a device type takes the arguments of the op by their names, so that their order cannot be "
                "mistaken. It may take the outputs by their names, the values of its configs and the workspace."
            ),
            'give the kernel the parameters of the op, and bind it with @op.kernel("cpu")',
        ),
        (
            "SL123",
            "a function takes a parameter for which there is no value",
            (
                "Functions that belong to a declaration are called by the names of their parameters, so that their "
                "order cannot be mistaken."
            ),
            "use the names that 'expected' lists",
        ),
        (
            "SL130",
            "aliases= does not fit the results",
            (
                "Each result is fresh, an argument that the op writes to, or a tensor that may be a view of an "
                "argument. A torch schema says which, and torch relies on it."
            ),
            'give aliases=("x", None): for each result the name of a tensor argument, or None for a fresh one',
        ),
        (
            "SL131",
            "an op with views has no kernels",
            (
                "A view moves no data, so a kernel would have nothing to do. Torch sees through such an op to its "
                "reference, which gives the gradient and the transforms too."
            ),
            "leave the reference alone, or return fresh tensors and remove the argument from aliases=",
        ),
        (
            "SL132",
            "a trace reads an attribute of an object that its class does not declare",
            (
                "While a graph is traced, the reference tells the sizes of results. They may depend on the fields of "
                "an object alone, since the graph is compiled for the values of those."
            ),
            "name the attribute in the fields= of the class",
        ),
        (
            "SL133",
            "a result has no value while a graph is traced",
            (
                "The reference tells what an op returns, and is run without data. A graph has symbols for integers "
                "that depend on data, none for other numbers that leave an op, and no branch can depend on one."
            ),
            "return a tensor without dims, and call .item() on it outside of the op",
        ),
        (
            "SL134",
            "the values that the backward reads cannot be found",
            (
                "A call keeps for its backward what the backward reads. Shiplap finds the reads in the code of the "
                "function and of its helpers, where each is an attribute of saved that is written out."
            ),
            'name the arguments and results that the backward reads: @op.backward(saves=("x", "out"))',
        ),
        (
            "SL137",
            "a graph cannot hold a call of an op that writes to its arguments",
            (
                "While a graph is traced, torch replaces an op that writes by one that returns copies. It does so only "
                "where every other result is a tensor, and it has a use of its own for an argument called mode."
            ),
            "return tensors from an op that writes, and rename an argument called mode",
        ),
        (
            "SL138",
            "the op cannot be mapped",
            (
                "torch.vmap makes one call of many. The op runs once for each sample, and the results are stacked, so "
                "they need the same shape; samples that write to the same memory would overwrite each other."
            ),
            "call the op for each sample, or map over the argument that it writes to",
        ),
        (
            "SL140",
            "the declaration has an unknown keyword",
            "Shiplap would ignore a misspelt keyword, and the op would lack that property.",
            "use one of the keywords under 'expected'",
        ),
        (
            "SL142",
            "the adopted implementation does not fit the declaration",
            "A declared op calls what it adopts with its own arguments, in their order or by their names.",
            "declare the arguments and the writes that 'got' shows",
        ),
    ],
)
register(
    MissingValueError,
    [
        (
            "SL135",
            "the backward reads a value that was not saved",
            (
                "With saves=, a call keeps only the tensors that it names for the backward. Without it, a call keeps "
                "those that Shiplap finds in the backward's code."
            ),
            "name in saves= every tensor that the backward reads, the one under 'got' too",
        ),
    ],
)
