"""Host processes on the machines of a Ray cluster: started, called together, and told apart when they fail.

Ray is imported where it is used. Nothing here knows what the processes compute.
"""
