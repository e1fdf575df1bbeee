"""Modules of Python in which Python has made functions that no file shows, such as a method of a string that is bound
to a name. A snapshot of functions has them, so that a candidate may import them.
"""

from __future__ import annotations

import contextlib
import importlib

MODULES = """
asyncio email._encoded_words email.policy http.cookies importlib.metadata._adapters multiprocessing.managers
multiprocessing.sharedctypes
"""
ENCODINGS = """
big5 big5hkscs cp932 cp949 cp950 euc_jis_2004 euc_jisx0213 euc_jp euc_kr gb18030 gb2312 gbk hz iso2022_jp iso2022_jp_1
iso2022_jp_2 iso2022_jp_2004 iso2022_jp_3 iso2022_jp_ext iso2022_kr johab shift_jis shift_jis_2004 shift_jisx0213
"""


def import_unshown_modules() -> None:
    """Import these modules, apart from those that this Python lacks. Nothing is done for modules that were imported
    before.
    """
    for module in (*MODULES.split(), *(f"encodings.{name}" for name in ENCODINGS.split())):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
