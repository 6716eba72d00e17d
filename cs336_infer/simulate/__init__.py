"""Traces of real traffic and traffic that is made up: what the engine and its cache are measured with.

trace:     requests from a file of any known format, one at a time.
synthetic: conversations with the statistics of a published trace, from a seed.
sources:   a name -> requests that can be read again and again.
"""
