"""User-written environments: tools, classes with state, and agent programs, in processes under limits.

The code is written in one file and named in the configuration. All functions and methods may be `async def`.

*Tools* are functions with type hints and a docstring in Google style. The policy is shown the value that a tool
returns, or the error that it raises. An episode ends with a reply that calls no tool.

*An environment* is a class; every episode has its own instance:

    class Maze:
        def reset(self, record, seed): ...    # messages, a text, or an `Opening`; a group's episodes share the seed
        def step(self, reply): ...            # an `Observation`, a text, or (text, reward, done)
        def close(self): ...                  # optional

or, as in TRL, a class whose public methods are tools. It has a method `reset(self, **record)`, whose text is appended
to the record's prompt, and optionally `get_reward(self)`.

*An agent program* is a function `run(session, record)` that calls `session.base_url` with `session.api_key` like
OpenAI's API and returns a score or None.

For vision policies, PIL images or message parts (`Content`) may be returned in place of a text.

The types (`Reply`, `Observation`, ...) are in `jaxrlhf.episode`. Processes that run user code import this package, so
it loads nothing heavy.
"""
