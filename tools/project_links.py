"""Write the address of the project's home wherever it belongs: ``project_links.py [--check]``.

``[tool.shiplap] home`` of the root ``pyproject.toml`` is the only place that holds the address. From it follow
``[project.urls]`` of each published distribution, the links at the end of each distribution's README, the address in
``CITATION.cff`` and ``mkdocs.yml``, and how the pages say to install. While the setting is empty, the metadata has no
addresses, the READMEs name pages by their place in the repository, and the pages install from a clone. ``--check``
writes nothing, and fails where a file is not what the setting says.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CLONE = """\
<!-- fragment: installs packages -->
```console
$ python3 -m venv env && . env/bin/activate
# the core: pure Python, no compiler needed
$ pip install ./packages/shiplap-headers ./packages/shiplap
# products that fuse, sparse 3D convolution, `shiplap demo`, sparse 8-bit linear layers
$ pip install ./packages/shiplap-dense scikit-build-core cmake ninja
$ pip install --no-build-isolation "./packages/shiplap-sparse3d[demo]"
$ pip install --no-build-isolation ./packages/shiplap-slidesparse
# the generator for new devices, `shiplap backend`
$ pip install "./packages/shiplap-backend[openvino]"
```

Run the commands in a clone of the repository. The first two are enough for the core. From a folder of wheels, such as
`make wheel` writes, install by file, since an index may have other packages of these names: `pip install dist/*.whl
"shiplap-sparse3d[demo]"`, or for the core alone `pip install dist/shiplap_headers-*.whl dist/shiplap-*.whl`.
"""
INDEX = """\
<!-- fragment: installs packages -->
```console
# the core: pure Python, no compiler needed
$ pip install shiplap
# matrix products and convolutions that fuse with their neighbours
$ pip install shiplap-dense
# sparse 3D convolution, and the demonstration: `shiplap demo`
$ pip install "shiplap-sparse3d[demo]"
# linear layers with structured sparsity and 8-bit products
$ pip install shiplap-slidesparse
# the generator for new devices: `shiplap backend`
$ pip install "shiplap-backend[openvino]"
```

The newest state of the repository is installed from a clone of {home}: `pip install ./packages/shiplap-headers
./packages/shiplap`.
"""


def settings(root: Path) -> tuple[str, dict[str, list[str]]]:
    """The address of the home, and for each distribution the pages that its README names."""
    table = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["shiplap"]
    return table["home"].rstrip("/"), table["pages"]


def with_urls(text: str, package: str, home: str) -> str:
    """A ``pyproject.toml`` with the ``[project.urls]`` of the home, or without any."""
    text = re.sub(r"\[project\.urls\]\n(?:.+\n)*\n", "", text)
    if not home:
        return text
    urls = {
        "Homepage": home,
        "Documentation": f"{home}/blob/main/docs/index.md",
        "Source": f"{home}/tree/main/packages/{package}",
        "Changelog": f"{home}/blob/main/packages/{package}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }
    table = "[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls.items()) + "\n"
    head, bracket, rest = text.partition("\n[project.")
    if not bracket:
        head, bracket, rest = text.partition("\n[tool.")
    return f"{head}\n{table}{bracket[1:]}{rest}"


def between(text: str, mark: str, block: str) -> str:
    """``text`` with ``block`` between the comments that have this mark. ValueError without them."""
    whole = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    if not whole.search(text):
        raise ValueError(f"no <!-- {mark} --> ... <!-- /{mark} -->")
    return whole.sub(lambda match: f"{match[1]}{block}{match[2]}", text, count=1)


def links(root: Path, pages: list[str], package: str, home: str) -> str:
    """The list of pages at the end of a README."""
    files = [*pages, f"packages/{package}/CHANGELOG.md"]
    titles = [_title(root / file) for file in files]
    if home:
        return "".join(f"* [{title}]({home}/blob/main/{file})\n" for title, file in zip(titles, files, strict=True))
    return "".join(f"* {title}: `{file}` in the repository\n" for title, file in zip(titles, files, strict=True))


def _title(page: Path) -> str:
    return next(line[2:] for line in page.read_text("utf-8").splitlines() if line.startswith("# "))


def with_line(text: str, key: str, value: str, after: str) -> str:
    """A YAML file with the line ``key: value`` behind the line of the key ``after``; without it for no value."""
    text = re.sub(rf"(?m)^{key}: .*\n", "", text)
    return re.sub(rf"(?m)^({after}: .*\n)", rf"\g<1>{key}: {value}\n", text, count=1) if value else text


def files(root: Path) -> dict[Path, str]:
    """Each file that names the home, and its text."""
    home, pages = settings(root)
    install = INDEX.format(home=home) if home else CLONE
    texts = {
        page: between(page.read_text("utf-8"), "install", install)
        for page in (root / "README.md", root / "docs" / "get-started.md")
    }
    for package, named in pages.items():
        folder = root / "packages" / package
        project, readme = folder / "pyproject.toml", folder / "README.md"
        texts[project] = with_urls(project.read_text("utf-8"), package, home)
        texts[readme] = between(readme.read_text("utf-8"), "links", links(root, named, package, home))
    for file, key, after in (("CITATION.cff", "repository-code", "license"), ("mkdocs.yml", "repo_url", "docs_dir")):
        texts[root / file] = with_line((root / file).read_text("utf-8"), key, home, after)
    return texts


def main(arguments: list[str]) -> int:
    """Write the files, or compare them; 1 where one differs."""
    parser = argparse.ArgumentParser(description="Write the address of the project's home wherever it belongs.")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a file differs")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository, by default this one")
    given = parser.parse_args(arguments)
    differing = [(p, text) for p, text in files(given.root).items() if p.read_text("utf-8") != text]
    for path, text in differing:
        if given.check:
            print(f"{path.relative_to(given.root)} is not what [tool.shiplap] home says", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(given.root))
    if given.check and differing:
        print("run: python tools/project_links.py", file=sys.stderr)
    return 1 if given.check and differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
