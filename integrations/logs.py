"""Makes dm_plugin's log lines visible in a job that has set up no logging: which backend runs, and why.

DM_PLUGIN_LOG=DEBUG|INFO|WARNING|ERROR; default INFO on rank 0 and WARNING on the others. A logging set-up of the job's own is left alone.
"""

import logging
import os

from dm_plugin.session import process_rank


def ensure_handler() -> None:
    """Called where an integration is switched on. Raises ValueError for an unknown DM_PLUGIN_LOG."""
    log = logging.getLogger("dm_plugin")
    word = os.environ.get("DM_PLUGIN_LOG", "INFO" if process_rank() == 0 else "WARNING").upper()
    if word not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(f"DM_PLUGIN_LOG={word} is not a log level; use DEBUG, INFO, WARNING or ERROR")
    if log.level == logging.NOTSET:
        log.setLevel(word)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[dm_plugin] %(message)s"))
        log.addHandler(handler)
