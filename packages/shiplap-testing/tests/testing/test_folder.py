"""A folder goes with the process that made it."""

import os

from shiplap_testing.folder import _remove, temporary


def test_a_process_that_was_forked_leaves_the_folder_to_the_one_that_made_it():
    folder = temporary("test")
    pid = os.fork()
    if not pid:
        _remove(folder, os.getppid())
        os._exit(0)
    os.waitpid(pid, 0)
    assert folder.is_dir()
    _remove(folder, os.getpid())
    assert not folder.exists()
