"""The inputs of the command line: a model, and tokens for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shiplap import ShiplapError
from shiplap.plugin_api import error, verbs
from shiplap.plugin_api.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["model_of", "tokens_of"]

_FIX = "pass a directory, or file.py:name of a module or of a function that returns one"


def model_of(target: str) -> nn.Module:
    """Return the model that ``target`` names. ``target`` is a directory that transformers' ``save_pretrained`` wrote,
    or ``module[:name]`` or ``file.py[:name]``. The object ``name`` (by default ``model``) is a torch module or a
    function without arguments that returns one. Raise ``SL501`` if ``target`` names no model, and ``SL601`` if it
    cannot be loaded or made.
    """
    if Path(target).is_dir():
        return _load_pretrained(target)
    from torch import nn

    home = target.partition(":")[0]
    # A path without a file is a mistyped directory, and no name of a Python module.
    if "/" in home and not home.endswith(".py"):
        raise error("SL501", where=target, what="the target names no model", got="no such directory", fix=_FIX)
    module, name = verbs.load_target(target)
    value = model = getattr(module, name or "model", None)
    if callable(model) and not isinstance(model, nn.Module):
        value = _call_model_factory(model, target)
    if isinstance(value, nn.Module):
        return value
    if model is not None:
        raise error(
            "SL501",
            where=target,
            what="the target names no model",
            got=type(value).__name__,
            expected="a torch module",
            fix=_FIX,
        )
    names = [
        n
        for n, v in vars(module).items()
        if isinstance(v, nn.Module) or (callable(v) and getattr(v, "__module__", "") == module.__name__)
    ]
    raise error(
        "SL501",
        where=target,
        what="the target names no model",
        got=name or "model",
        fix=_FIX,
        expected=verbs.near_miss(name or "model", names) if names else "a torch module",
    )


def _load_pretrained(target: str) -> nn.Module:
    """Return the causal language model in the directory ``target``, loaded with transformers' ``from_pretrained``. The
    model may have been converted before it was saved. Raise ``SL601`` if it cannot be loaded.
    """
    transformers = _import_transformers(target)
    from shiplap_slidesparse import hf

    # Needed for converted directories, whose config names our quantizer.
    hf.register()
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(target, dtype="auto", local_files_only=True)
    except ShiplapError:
        raise
    except Exception as e:  # whatever is wrong with the files of a user
        raise error(
            "SL601",
            where=target,
            what="the model cannot be loaded",
            got=_first_line(e),
            expected="a causal language model that save_pretrained wrote",
            fix=_FIX,
        ) from e


def _call_model_factory(make: Callable[[], Any], target: str) -> Any:
    """Call the user's function ``make`` and return its result, whose type is not checked. Raise ``SL601`` with the
    function's error if it raises one. ``target`` names the function in the error.
    """
    try:
        return make()
    except Exception as e:  # the user's code
        raise error(
            "SL601",
            where=target,
            what="the model cannot be constructed",
            got=_first_line(e),
            expected="a function without arguments that returns a torch module",
        ) from e


def _first_line(failure: Exception) -> str:
    """Return the class name of ``failure`` and the first line of its message, such as ``ValueError: bad size``."""
    return f"{type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"


def tokens_of(tokens: Path | None, text: Path | None, model: str) -> list[int]:
    """Return the token numbers in the file ``tokens``, or those of the text file ``text`` by the tokenizer in the
    directory ``model``. Return an empty list if neither file is given. Raise ``SL613`` if both are given or the file
    has fewer than two tokens.
    """
    if tokens is not None and text is not None:
        raise error("SL613", where="slidesparse report", got="both --tokens and --text", expected="one of them")
    if tokens is not None:
        numbers = _read_token_numbers(tokens)
    elif text is not None:
        numbers = _tokenize_file(text, model)
    else:
        return []
    if len(numbers) < 2:
        raise error(
            "SL613",
            where=str(tokens or text),
            got=f"{len(numbers)} tokens",
            expected="two or more tokens, since each is predicted from those before it",
            fix="pass another file",
        )
    return numbers


def _tokenize_file(text: Path, model: str) -> list[int]:
    """Return the token numbers of the file ``text`` by the tokenizer in the directory ``model``. Raise ``SL613`` if
    ``model`` is not a directory or has no tokenizer.
    """
    if not Path(model).is_dir():
        raise error(
            "SL613",
            where="--text",
            got=f"{model}, which has no tokenizer",
            expected="a directory of transformers, or --tokens",
        )
    written, transformers = _read_text_file(text), _import_transformers(model)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, ImportError) as e:
        raise error(
            "SL613",
            where="--text",
            got=f"no tokenizer in {model}: {_first_line(e)}",
            expected="a tokenizer in that directory, such as tokenizer.json",
            fix="save the tokenizer there, or pass --tokens",
        ) from None
    return list(tokenizer(written)["input_ids"])


def _read_token_numbers(path: Path) -> list[int]:
    """Return the token numbers in the file ``path`` as a list. The file holds a JSON list of integers, or integers
    separated by white space. Raise ``SL613`` for any other content.
    """
    written = _read_text_file(path)
    try:
        # A JSON list, or numbers between spaces.
        plain = not written.lstrip().startswith("[")
        numbers: Any = [int(part) for part in written.split()] if plain else parse_json(written.encode())
    except ValueError:
        numbers = None
    # ``true`` in JSON is an int to isinstance.
    if not isinstance(numbers, list) or any(type(v) is not int for v in numbers):
        raise error("SL613", where=str(path), got="other text", expected="numbers of tokens: [1, 2, 3] or 1 2 3")
    return numbers


def _read_text_file(path: Path) -> str:
    """Return the text of a UTF-8 file. Raise ``SL602`` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise error(
            "SL602",
            where=str(path),
            what="the file cannot be read",
            got=getattr(e, "strerror", None) or e,
            expected="a text file",
        ) from None


def _import_transformers(target: str) -> Any:
    """Return the module ``transformers``. Raise ``SL603`` if it is not installed, and ``SL501`` if the directory
    ``target`` has no ``config.json``.
    """
    try:
        import transformers
    except ImportError:
        raise error(
            "SL603",
            where=target,
            got="no transformers",
            expected="Hugging Face's library",
            fix="install it: pip install transformers",
        ) from None
    if not (Path(target) / "config.json").is_file():
        raise error(
            "SL501",
            where=target,
            what="the directory has no model",
            got="no config.json",
            expected="a directory that save_pretrained wrote",
            fix="pass a directory that save_pretrained wrote, or file.py:name",
        )
    return transformers
