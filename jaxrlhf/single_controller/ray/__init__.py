"""Host processes on the machines of a Ray cluster: start, collective calls, and diagnosis of failures.

Ray is imported only where it is used. Nothing in this package depends on the computation in the processes.
"""
