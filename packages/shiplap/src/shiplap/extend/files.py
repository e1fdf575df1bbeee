"""Files of a family that are written by one process and read by another, and that a kill may meet at any time.

``write_whole(path, content)`` leaves the old content or all of the new one. ``parse_json(content)`` reads what a file
of ours holds, with limits on size and depth; ValueError says in one line what is wrong with it.
"""

from shiplap.trust import parse_json, write_whole

__all__ = ["parse_json", "write_whole"]
