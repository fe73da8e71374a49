"""Keep hivemind and its p2p daemon off the user's terminal; import this before hivemind.

Both log through Python and to stderr on their own terms. What they report reaches us as exceptions.
"""

import logging
import os

os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
os.environ.setdefault("GOLOG_LOG_LEVEL", "FATAL")
# hivemind reaches for pydantic and others that warn of their own future; not a user's matter
logging.getLogger("hivemind").setLevel(logging.CRITICAL)
