"""Traces of real traffic and traffic that is made up, and an engine in a simulated clock that serves them.

trace:     requests from a file of any known format, one at a time.
synthetic: conversations with the statistics of a published trace, from a seed.
sources:   a name -> requests that can be read again and again.
serving:   a server whose steps take a stated time, a policy that fills them, and goodput (`serving_policies`).
"""
