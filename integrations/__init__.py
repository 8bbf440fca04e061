"""Adapters that put dm_plugin's attention and probes into someone else's training stack.

Nothing here is imported by dm_plugin itself (the command line does so lazily); each adapter imports its host only when used.
"""
