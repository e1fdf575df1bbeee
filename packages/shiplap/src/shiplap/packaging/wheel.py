"""A wheel with native code from a wheel without: unpacked, filled, tagged for its platform and packed again."""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import io
import lzma
import os
import re
import stat
import sysconfig
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shiplap import safe_io
from shiplap.dispatch.package_folder import FOLDER
from shiplap.errors import ShiplapError, error, writing
from shiplap.packaging.contents import NO_EXTRAS, PackageContents, PackageExtras
from shiplap.packaging.tags import platform_tag
from shiplap.packaging.worker import fill_apart
from shiplap.safe_io.work_folders import work_folder

LIMIT = 1 << 32  # bytes of a wheel, unpacked
FILES = 100_000  # in one wheel
EPOCH = (315532800, 4354819198)  # 1980 and 2107: the times that a zip file can state
_PART = r"[^-\s]+"  # no line can be added to the file WHEEL
_NAME = re.compile(
    rf"(?P<stem>{_PART}-{_PART}(?:-\d[^-\s]*)?)-(?P<python>{_PART})-(?P<abi>{_PART})-(?P<platform>{_PART})\.whl"
)
# The minor version of the C library that a tag promises.
_MANYLINUX = re.compile(r"manylinux_2_(\d+)_")


@dataclass(frozen=True)
class WheelRequest:
    """The path of a wheel to which native bindings are to be added, and the options for this.

    Attributes:
        wheel: the path of the wheel.
        output: the folder for the new wheel, by default the folder of ``wheel``.
        modules: the modules that declare ops. By default they are the modules of the wheel's entry points
            ``shiplap.families`` or, without such entry points, its top-level packages.
        platform: the platform tag of the new wheel. By default it is the tag of ``wheel``. If that tag is ``any``, or a
            manylinux tag that is too old for the bindings, a tag is derived from the libraries.
        extras: a table of choices and compiled Triton kernels, if they are to be added.
    """

    wheel: Path
    output: Path | None = None
    modules: tuple[str, ...] = ()
    platform: str = ""
    extras: PackageExtras = NO_EXTRAS


@dataclass(frozen=True)
class PackedWheel:
    """A wheel that was written.

    Attributes:
        wheel: its path.
        contents: for each package, the libraries, the ops with a native binding, and the ops without one.
        warning: the reason why package indexes will refuse the platform tag of the wheel, or an empty string.
    """

    wheel: Path
    contents: tuple[PackageContents, ...]
    warning: str = ""


def package(request: WheelRequest, say: Callable[[str], None] = lambda line: None) -> PackedWheel:
    """Compile the native bindings of the ops in a wheel and write a wheel that contains them. Return its path and
    contents.

    The new wheel has a platform tag. If its name differs from the old name and both wheels would be in one folder, the
    old wheel is removed.

    Args:
        request: the wheel, and the options for it.
        say: a function that is called with one line of text before each step that takes long.

    Raises:
        ShippingError: ``SL308`` for a package that bindings cannot be added to, ``SL310`` for a file that is not a
            wheel.
        CommandError: ``SL601`` if a module cannot be imported, ``SL602`` if the new wheel cannot be written.
        LibraryError: the errors of :func:`shiplap.packaging.contents.fill_packages`.
    """
    if not request.wheel.exists():
        fix = "pass the path of a wheel, such as one that 'python -m build' wrote to dist/"
        raise error("SL310", where=str(request.wheel), got="No such file or directory", expected="a wheel", fix=fix)
    # The tags are a part of the name, which the new wheel takes over.
    name = _NAME.fullmatch(request.wheel.name)
    if name is None:
        raise _not_a_wheel(request.wheel, f"the name {request.wheel.name}")
    if request.platform and not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)*", request.platform):
        raise error(
            "SL308",
            where=str(request.wheel),
            got=f"the platform tag {request.platform!r}",
            expected="a tag such as manylinux_2_28_x86_64",
            fix="pass --platform with a tag of lower-case letters, digits and underscores",
        )
    # Before anything is unpacked or compiled.
    _check_extras(request)
    with work_folder("wheel") as unpacked:
        files = _unpack_wheel(request.wheel, unpacked)
        modules = request.modules or tuple(_modules_of_wheel(request.wheel, files, unpacked))
        say(f"binding the ops of {', '.join(modules)}: a compiler runs for some seconds")
        contents = fill_apart(modules, unpacked, request.extras)
        libraries = [path for path in unpacked.rglob("*.so*") if path.is_file()]
        tag, warning = _choose_platform(request, name["platform"], libraries)
        target = (request.output or request.wheel.parent) / f"{name['stem']}-{name['python']}-{name['abi']}-{tag}.whl"
        say(f"writing {target}")
        _write_wheel(target, unpacked, files, f"{name['python']}-{name['abi']}-{tag}")
    # pip would otherwise choose between two wheels of one version by their tags.
    if target.parent.resolve() == request.wheel.parent.resolve() and target.name != request.wheel.name:
        request.wheel.unlink()
    return PackedWheel(target, tuple(contents), warning)


def _check_extras(request: WheelRequest) -> None:
    """Raise ``SL308`` if the request has GPU architectures without recorded calls, or calls without architectures.
    Raise it also for an invalid architecture.
    """
    extras, got, fix = request.extras, "", "pass --cubins 90 together with --calls calls.jsonl"
    if bool(extras.cubins) != (extras.calls is not None):
        got = "calls without an architecture" if extras.calls is not None else "architectures without calls"
    # Compute capabilities without the point, from 5.0 on.
    elif strange := [each for each in extras.cubins if not 50 <= each <= 999]:
        got, fix = f"the architecture {strange[0]}", "pass --cubins 90 for compute capability 9.0"
    if got:
        expected = "architectures, and the calls for which Triton kernels are compiled"
        raise error("SL308", where=str(request.wheel), got=got, expected=expected, fix=fix)


def _choose_platform(request: WheelRequest, now: str, libraries: Iterable[Path]) -> tuple[str, str]:
    """Return the platform tag of the new wheel, and the reason why package indexes will refuse it. The reason is an
    empty string if they accept it.

    If ``request`` names a tag, it is that tag. Otherwise it is ``now``, the tag of the old wheel, unless that tag is
    generic or promises an older system than the files ``libraries`` need. It is then derived from ``libraries``.
    """
    if request.platform:
        return request.platform, ""
    read, why = platform_tag(libraries)
    # manylinux2014 is the older name of manylinux_2_17.
    promised = [int(minor) for minor in _MANYLINUX.findall(now.replace("manylinux2014", "manylinux_2_17"))]
    needed = [int(minor) for minor in _MANYLINUX.findall(read)]
    if now == "any" or now == sysconfig.get_platform().replace("-", "_").replace(".", "_"):
        return read, why
    # The bindings may need a newer C library than the libraries that the tag of the wheel was made for.
    return (read if promised and needed and needed > [min(promised)] else now), ""


def _unpack_wheel(wheel: Path, folder: Path) -> dict[str, zipfile.ZipInfo]:
    """Unpack the file ``wheel`` into ``folder``. Return a mapping from name to ``ZipInfo`` of its files. Native
    bindings of an earlier run are left out.

    Raise ``SL310`` if the file is not a wheel or is unsafe.
    """
    try:
        with os.fdopen(safe_io.open_file(wheel, safe_io.NAMED), "rb") as file, zipfile.ZipFile(file) as archive:
            files = {info.filename: info for info in archive.infolist() if not info.is_dir()}
            # Such a name could be written outside of the folder.
            strange = next((n for n in files if PurePosixPath(n).is_absolute() or ".." in PurePosixPath(n).parts), "")
            # The sum of the declared sizes is checked before anything is extracted, against archives that expand
            # without end.
            if strange or sum(info.file_size for info in files.values()) > LIMIT:
                raise _not_a_wheel(wheel, f"the name {strange!r} in it" if strange else f"more than {LIMIT} bytes")
            if len(files) > FILES:
                raise _not_a_wheel(wheel, f"more than {FILES} files")
            files = {name: info for name, info in files.items() if FOLDER not in PurePosixPath(name).parts}
            for name in files:
                archive.extract(name, folder)
    # zipfile raises RuntimeError for encrypted files, NotImplementedError for other compressions.
    except (OSError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, RuntimeError) as e:
        if isinstance(e, ShiplapError):
            raise
        raise _not_a_wheel(wheel, safe_io.unsafe_reason(e)) from None
    if not _dist_info_file(files, "WHEEL"):
        raise _not_a_wheel(wheel, "no file *.dist-info/WHEEL")
    return files


def _read_metadata(wheel: Path, file: Path) -> str:
    """Return the content of ``file``, a metadata file of the wheel, as a string. Raise ``SL310`` unless it is UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise _not_a_wheel(wheel, f"{file.name} with {e.reason}") from None


def _not_a_wheel(wheel: Path, got: str) -> Exception:
    """Return the error ``SL310`` for the file ``wheel``, which is not a wheel. ``got`` says why."""
    return error("SL310", where=str(wheel), got=got, expected="a wheel such as mylib-1.0-py3-none-any.whl")


def _dist_info_file(files: Iterable[str], name: str) -> str:
    """Return the path of the file ``name`` in the folder ``*.dist-info`` among ``files``, or an empty string."""
    return next((f for f in files if re.fullmatch(rf"[^/]+\.dist-info/{re.escape(name)}", f)), "")


def _modules_of_wheel(wheel: Path, files: Mapping[str, zipfile.ZipInfo], folder: Path) -> Iterator[str]:
    """Yield the names of the modules that a wheel's entry points name as families. Without such entry points, yield the
    names of its top-level packages. ``files`` are the files of the wheel, which are unpacked in ``folder``.

    Raise ``SL310`` if the entry points cannot be read.
    """
    # A value such as ``mylib.ops:name`` contains a colon, which is a delimiter by default.
    listed = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    if entry_points := _dist_info_file(files, "entry_points.txt"):
        try:
            listed.read_string(_read_metadata(wheel, folder / entry_points))
        except configparser.Error as e:
            raise _not_a_wheel(wheel, f"entry_points.txt: {e.message.splitlines()[0]}") from None
    if listed.has_section("shiplap.families"):
        yield from dict.fromkeys(value.partition(":")[0].strip() for value in listed["shiplap.families"].values())
    else:
        tops = dict.fromkeys(PurePosixPath(name).parts[0] for name in files if name.endswith("/__init__.py"))
        yield from (top for top in tops if (folder / top / "__init__.py").is_file())


# --- written again ----------------------------------------------------------------------------------------------------


def _write_wheel(target: Path, folder: Path, files: Mapping[str, zipfile.ZipInfo], tag: str) -> None:
    """Write the wheel ``target`` from the old wheel's files ``files`` and the new files, all of which are in
    ``folder``. It has the tags ``tag``, such as ``py3-none-linux_x86_64``, and a new RECORD. Raise ``SL602`` if it
    cannot be written. A file at ``target`` is replaced only when the new one is complete.
    """
    about, record = (
        _dist_info_file(files, "WHEEL"),
        _dist_info_file(files, "RECORD") or _dist_info_file(files, "WHEEL").replace("WHEEL", "RECORD"),
    )
    safe_io.write_text(folder / about, _with_tags(_read_metadata(target, folder / about), tag))
    new = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if _is_new(p, folder, files))
    rows = []
    # In the same folder, since a rename cannot cross file systems.
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with writing(target, "the wheel"):
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch.unlink(missing_ok=True)
            with zipfile.ZipFile(scratch, "x", zipfile.ZIP_DEFLATED) as archive:  # a link of that name is not followed
                # RECORD lists the digest of every other file, so it is written last.
                for name in [*(n for n in files if n != record), *new]:
                    content = (folder / name).read_bytes()
                    archive.writestr(files.get(name) or _zip_entry(name), content, zipfile.ZIP_DEFLATED)
                    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                    rows.append((name, f"sha256={digest}", str(len(content))))
                archive.writestr(_zip_entry(record), _record_text([*rows, (record, "", "")]))
            scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


def _is_new(path: Path, folder: Path, files: Mapping[str, zipfile.ZipInfo]) -> bool:
    """Return whether ``path`` is a file below a folder of native bindings and was not in the unpacked wheel. Other new
    files, such as the bytecode that Python writes at an import, do not count. ``files`` holds the wheel's own files by
    name, and ``folder`` is where it was unpacked.
    """
    parts = path.relative_to(folder).parts
    return path.is_file() and FOLDER in parts and "/".join(parts) not in files


def _zip_entry(name: str) -> zipfile.ZipInfo:
    """Return the archive header of a file that any user may read. Its time is that of the environment variable
    ``SOURCE_DATE_EPOCH``, by default the start of 1980.
    """
    # The same sources make the same wheel, byte by byte.
    asked = os.environ.get("SOURCE_DATE_EPOCH", "")
    seconds = min(max(int(asked) if asked.isdecimal() else EPOCH[0], EPOCH[0]), EPOCH[1])
    entry = zipfile.ZipInfo(name, time.gmtime(seconds)[:6])
    # The upper half of the field is the Unix mode of the file.
    entry.external_attr = (stat.S_IFREG | 0o644) << 16
    return entry


def _record_text(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return the rows (path, digest, size) of a wheel's RECORD as a string of CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _with_tags(about: str, tag: str) -> str:
    """Return ``about``, the content of the file WHEEL, with its tags replaced by ``tag``, such as
    ``py3-none-linux_x86_64``. Each of the three parts of ``tag`` may be several tags joined by points. The file then
    has a line for each combination.
    """
    python, abi, platform = (part.split(".") for part in tag.split("-"))
    # A wheel with libraries is for one platform, so the old tags and purity are dropped.
    kept = [line for line in about.splitlines() if line and not line.startswith(("Tag:", "Root-Is-Purelib:"))]
    tags = [f"Tag: {py}-{a}-{p}" for py in python for a in abi for p in platform]
    return "\n".join([*kept, "Root-Is-Purelib: false", *tags]) + "\n"
