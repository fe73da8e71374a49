"""Keep hivemind and its p2p daemon off the user's terminal; runs before hivemind is imported.

Both log through Python and to stderr on their own terms, and hivemind leaves failed tasks for
asyncio to report. What matters of it reaches us as exceptions. Never hides a failure of our own.
"""

import logging
import os
import traceback

os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
os.environ.setdefault("GOLOG_LOG_LEVEL", "FATAL")
logging.getLogger("hivemind").setLevel(logging.CRITICAL)


def is_ours(record: logging.LogRecord) -> bool:
    """Tell whether a report of asyncio is about anything but a task inside hivemind alone."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return True
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    theirs = any("/hivemind/" in file for file in files)
    return not theirs or any("/spesd/" in file for file in files)


logging.getLogger("asyncio").addFilter(is_ours)
