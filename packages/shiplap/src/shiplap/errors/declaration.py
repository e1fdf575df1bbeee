"""Declarations: SL1xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register

SAVED_AND_NEEDS = (
    "saved has the scalars of the op and the tensors that the function reads, such as saved.x, and needs.x is True if "
    "the gradient of x is used"
)


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
                "A torch op is called namespace::name, or namespace::name.overload. Each part must be an ASCII "
                "identifier that is no keyword of Python. The namespace and the name must not be those of torch "
                "itself."
            ),
            (
                "choose a name of this form, of letters, digits and underscores, with a namespace of your own, such as "
                '@sl.op("mylib::scale")'
            ),
        ),
        (
            "SL102",
            "an annotation is missing or cannot be evaluated",
            (
                "Shiplap derives the op's schema, its argument checks and its fake implementation from the "
                "annotations of the function."
            ),
            (
                'annotate each argument, such as x: Float[Tensor, "n c"] or stride: int = 1, and import each name '
                "that an annotation uses"
            ),
        ),
        (
            "SL103",
            "a torch schema cannot express this argument",
            (
                "A torch schema gives each argument an ASCII name, a type and optionally a default. The types are "
                "tensors, numbers, strings, lists of these, dtypes, devices, layouts, memory formats, generators, and "
                "classes derived from sl.Opaque."
            ),
            (
                "if 'got' shows a type, annotate the argument with a type that 'expected' lists. In place of an object "
                "of your own, pass each field that the op reads as an argument. If 'got' shows a name, rename the "
                "argument to ASCII letters. If it shows a default, write one that 'expected' describes"
            ),
        ),
        (
            "SL104",
            "the size of an output dim is unknown",
            (
                "Shiplap must know the size of every output dim before a kernel runs. The size must therefore be "
                "that of an input's dim, an expression in dims=, or an upper bound in bounds=."
            ),
            (
                "if an input has the same size, use the name of its dim. If the size can be computed, write "
                '@sl.op(..., dims={"m": "n // 2"}) with your own expression. If it depends on data, write an upper '
                'bound: @sl.op(..., bounds={"m": "n"})'
            ),
        ),
        (
            "SL105",
            "a dim of the declaration is not valid",
            (
                "Shiplap evaluates dims for real and for symbolic sizes, so only names, whole numbers and a few "
                "operations are possible. Each name must have one meaning, and an argument must determine its value."
            ),
            (
                "write what 'expected' describes. If one name has two meanings, use two names. An expression may use "
                "names of the arguments' dims, int arguments, whole numbers, + - * // %, comparisons, subscripts, and "
                "the functions len, prod, min, max, cdiv, gcd, pow2, pow2ceil, where and broadcast"
            ),
        ),
        (
            "SL106",
            "the dtype of an output is unknown",
            (
                "A dtype class such as Float stands for several dtypes. An output of such a class gets the dtype of "
                "an input with the same class, and no required input has this class."
            ),
            (
                'annotate the output with one dtype, such as Float32[Tensor, "n"], or with the dtype class of a '
                "required input"
            ),
        ),
        (
            "SL107",
            "an option of the declaration names an unsuitable argument",
            (
                "mutates=, contiguous= and specialize= list arguments of the op by their names. An op can write only "
                "to tensors, so mutates= takes nothing but tensors and lists of tensors."
            ),
            "name only arguments of the signature, and in mutates= only tensors or lists of tensors",
        ),
        (
            "SL108",
            "the op name is already taken",
            (
                "Two functions in different places declare an op of the same name. The second would replace the "
                "first for every caller."
            ),
            "give one of the two functions, which 'got' and 'expected' name, another op name",
        ),
        (
            "SL109",
            "the return annotation does not describe the results",
            (
                "Shiplap derives the schema of the op from the return annotation, and allocates the outputs by it. "
                "outputs= gives each new result a name, which no argument may have."
            ),
            (
                'write -> Float[Tensor, "n m"] for one tensor, -> tuple[Float[Tensor, "n"], Float[Tensor, "m"]] for '
                "several, or -> None with mutates= if the op only writes to arguments. If 'got' shows names of "
                "outputs, write outputs= with one unused name for each new result"
            ),
        ),
        (
            "SL110",
            "the backward function does not fit the op",
            (
                "A backward is one function, or several declared ops that return new tensors. It gets arguments and "
                "results of the op by their names, and returns a gradient for each argument that needs one."
            ),
            (
                "write a function of (grad, saved, needs) that returns a dict {argument name: gradient}. "
                f"{SAVED_AND_NEEDS}. Or pass one declared op for each gradient, without saves=. Each of these ops must "
                "return new tensors"
            ),
        ),
        (
            "SL112",
            "the autocast rule is unknown",
            (
                "autocast= names the dtype to which the floating-point arguments of a call are converted under "
                "torch.autocast."
            ),
            (
                'write autocast="widest" for the widest dtype among them, "autocast" for the dtype of the autocast '
                'context, "float32", or None for no conversion'
            ),
        ),
        (
            "SL113",
            "the declaration is not finished",
            (
                "'shiplap init' writes a draft of a declaration, which the decorator @unfinished marks. Only the "
                "author of the op knows the sizes of its outputs and the arguments that it mutates."
            ),
            (
                "fill in each line that is marked FILL. Then replace @unfinished by the decorator that the first lines "
                "of the draft name, @sl.op or @sl.adopt"
            ),
        ),
        (
            "SL114",
            "the kernel template of the op cannot be used",
            (
                "Inductor puts the code of neighbouring operations into the template. So the op must have one output "
                "of known size, must write to no argument, and must take no list of tensors. A Triton template also "
                "needs grid=, and every template needs a config."
            ),
            (
                "if the op has several outputs, an output of unknown size, an argument that it writes to or a list of "
                "tensors, bind a kernel with @op.kernel in place of the template. Otherwise pass the missing option, "
                "or correct the file, the function or the option under 'got', as 'expected' shows"
            ),
        ),
        (
            "SL115",
            "the bucket rule does not fit the op",
            (
                "Calls of one bucket share a tuned choice. The rule gives each dim and scalar of the op a kind. "
                '"pow2" rounds its value up to a power of two, "exact" keeps it, and "none" ignores it.'
            ),
            (
                'pass one of the kinds "pow2", "exact" and "none", and only names that \'expected\' lists, such as '
                'op.buckets("pow2", k="exact")'
            ),
        ),
        (
            "SL116",
            "the kernel has no valid config",
            (
                "A config is a dict with a value for each compile-time parameter of the kernel. configs= needs at "
                "least one config that fits the sizes of the call. A C kernel needs integers, under the same names "
                "in each config."
            ),
            (
                'pass configs= as a list of dicts whose keys are keywords of the kernel, such as configs=[{"BLOCK": '
                '64}, {"BLOCK": 128}]. For a C kernel, use the same keys in each dict, and integers. If no config fits '
                "the sizes under 'got', add one that does"
            ),
        ),
        (
            "SL117",
            "calls cannot be joined along this dim",
            (
                "op.batches lets Shiplap join several calls into one, with tensors concatenated along this dim. The "
                "dim must be one whole axis of an argument and of every output. The op must not write to arguments, "
                "and no other size may be computed from the dim."
            ),
            (
                "call op.batches with a dim that is one whole axis of an argument and of every output, and from which "
                "no other size is computed. If there is no such dim, or if the op writes to arguments, remove the call "
                "of op.batches"
            ),
        ),
        (
            "SL118",
            "the tolerance lacks a number or a reason",
            (
                "A declared tolerance permits a kernel to differ from its reference by more than rounding. Such a "
                "tolerance must state a relative error and a reason."
            ),
            'pass a number between 0 and 1 and the reason, such as tolerance=(1e-3, "tanh stands for erf")',
        ),
        (
            "SL119",
            "nondifferentiable= does not fit the op",
            (
                "nondifferentiable= names results that carry no gradient, and tensor arguments through which no "
                "gradient flows. An argument that the op writes to cannot be named, since it stays in the graph of "
                "autograd."
            ),
            "name only results, and tensor arguments that the op does not write to",
        ),
        (
            "SL120",
            "random= does not fit the op",
            (
                "Random results must be the same for the same seed. The seed is an int, an integer tensor or a "
                "generator among the arguments, or the state of torch's own generator. An op whose result may be a "
                "view cannot be random."
            ),
            (
                "write random= with the name of the argument that seeds the op. If the op draws from torch's own "
                "generator, write random='global'. If a result may be a view, remove aliases= and return new tensors"
            ),
        ),
        (
            "SL121",
            "unordered= does not fit the results",
            (
                "unordered= names results whose rows, along the first dim, may come in any order. The audit brings the "
                "rows of all named results into one order. So each of them must be one tensor, not a list, and all "
                "must have the same number of rows."
            ),
            (
                "name only results that 'expected' lists. If 'got' shows different numbers of rows, name only results "
                "that have the same first dim"
            ),
        ),
        (
            "SL122",
            "the kernel does not fit the op",
            (
                'A kernel belongs to a device type such as "cpu". Shiplap passes it the arguments of the op by their '
                "names. It may also take the outputs, the values of its configs and the workspace by their names."
            ),
            (
                "if 'got' shows a device type, bind the kernel to one of torch, such as @op.kernel(\"cpu\"). Otherwise "
                "give the kernel the parameters that 'expected' lists"
            ),
        ),
        (
            "SL123",
            "the sample builder takes a parameter for which there is no value",
            (
                "Shiplap calls the function that @op.samples decorates with values for the parameters rng, sizes, "
                "dtype and device, which it finds by their names. The function returns the arguments of one call, as a "
                "tuple."
            ),
            "name the parameters rng, sizes, dtype and device. Give any other parameter a default",
        ),
        (
            "SL130",
            "aliases= does not fit the results",
            (
                "Each result is a new tensor, an argument that the op writes to, or a tensor that may be a view of "
                "an argument. The schema of the op says which, and torch relies on it."
            ),
            (
                "give aliases= one entry for each result: the name of a tensor argument, or None for a new tensor, "
                'such as aliases=("x", None)'
            ),
        ),
        (
            "SL131",
            "a kernel or a gradient was added to an op that returns views",
            (
                "A view moves no data, so a kernel would have nothing to do. Torch runs the reference of such an op, "
                "and takes the gradient and transforms such as vmap from it."
            ),
            (
                "if the op returns views, remove the kernel or the gradient. If it computes new values, return new "
                "tensors and remove aliases= instead"
            ),
        ),
        (
            "SL132",
            "the reference reads an attribute that the class of an argument does not declare",
            (
                "While torch traces a graph, the reference computes the sizes of the results. Of an object it may "
                "read only the attributes in fields= of its class, because the graph is compiled for their values."
            ),
            (
                "if sizes depend on the attribute, add it to fields=, such as class Table(sl.Opaque, "
                'fields=("size",)). If not, do not read it in the reference'
            ),
        ),
        (
            "SL133",
            "a result has no value while a graph is traced",
            (
                "While a graph is traced, the reference runs on tensors without data. A graph can carry an int that "
                "depends on data, but no other number. So the reference must not return such a float or bool, nor "
                "branch on it."
            ),
            (
                "return a tensor without dims in place of the number, and call .item() on it outside of the op. "
                "Replace a branch on such a number by torch.where"
            ),
        ),
        (
            "SL134",
            "Shiplap cannot find the values that the backward reads",
            (
                "A call keeps for its backward only the values that the backward reads. Shiplap finds them in the "
                "code of the backward and of its helpers, where each must be written as saved.name."
            ),
            'name the arguments and results that the backward reads: @op.backward(saves=("x", "out"))',
        ),
        (
            "SL137",
            "the op cannot be traced because it writes to its arguments",
            (
                "While a graph is traced, torch replaces an op that writes by one that returns copies. This fails if "
                "the op also returns something other than single tensors, if an argument is called 'mode', and inside "
                "torch.func.functionalize or a nested compiled region."
            ),
            (
                "if 'got' names a result, return a single tensor in its place. If it names the argument 'mode', rename "
                "the argument. Otherwise call the op outside of functionalize and of nested regions"
            ),
        ),
        (
            "SL138",
            "torch.vmap cannot map the op",
            (
                "torch.vmap runs the op once for each sample and stacks the results, so these need the same shape. "
                "Samples that write to the same memory would overwrite each other. Random results need "
                'randomness="different".'
            ),
            (
                "call the op in a loop over the samples. Under torch.vmap, map over the argument that the op writes to "
                "as well if 'got' names one, and pass randomness=\"different\" if it names random results"
            ),
        ),
        (
            "SL139",
            "TorchScript cannot compile the op itself",
            (
                "torch.jit.script compiles functions and modules of Python. An op is an object that torch knows "
                "already. In a function, TorchScript knows an op if its name has no overload, no other op has that "
                "name, and calls convert no values (as for members of an enum, or a tuple of one result). For another "
                "op TorchScript raises an error of its own, such as that it cannot get the source of the annotation "
                "jaxtyping.Float[...]: write torch.ops.namespace.name in the function, which takes and returns the "
                "values of the schema."
            ),
            "pass torch.jit.script a function or a module that calls the op: its graph then has the op as a node",
        ),
        (
            "SL140",
            "a keyword is not known",
            (
                "If a misspelt keyword were ignored, the declaration or the call would lack what it states. A value of "
                "another type, such as a function for a text, is refused in the same way."
            ),
            "write one of the keywords that 'expected' lists, or a value as 'expected' describes it",
        ),
        (
            "SL142",
            "the adopted implementation does not fit the declaration",
            (
                "A declared op passes its own arguments to the implementation that it adopts. So both must take the "
                "same arguments and write to the same ones."
            ),
            "declare the arguments that 'got' shows, and list in mutates= those that the implementation writes to",
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
                "With saves=, a call keeps for its backward only the tensors that saves= names. Without saves=, it "
                "keeps those that Shiplap finds in the backward's code. needs has one entry for each tensor argument."
            ),
            (
                "if 'got' begins with saved, list in saves= every tensor that the backward reads, including this one. "
                "If it begins with needs, read a name under 'expected'"
            ),
        ),
    ],
)
