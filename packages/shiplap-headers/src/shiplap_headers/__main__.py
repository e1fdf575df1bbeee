"""``python -m shiplap_headers --include | --cmake``: print a folder, for build scripts."""

import sys

from shiplap_headers import cmake_dir, include_dir

FOLDERS = {"--include": include_dir, "--cmake": cmake_dir}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in FOLDERS:
        sys.exit("usage: python -m shiplap_headers --include | --cmake")
    print(FOLDERS[sys.argv[1]]())
