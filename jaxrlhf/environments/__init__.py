"""Environments of a user's own: tools, classes with state, and agent programs, in processes under limits.

Written in one file, and named in the configuration. Any of them may be `async def`.

*Tools* are functions with type hints and a docstring of Google's form. What they return, or the error that they raise,
is what the policy is told; an episode is over with a reply that calls none.

*An environment* is a class, with an instance for every episode:

    class Maze:
        def reset(self, record, seed): ...    # messages, a text, or an `Opening`; group members have the same seed
        def step(self, reply): ...            # an `Observation`, a text, or (text, reward, done)
        def close(self): ...                  # optional

or, as in TRL, a class whose public methods are tools, with `reset(self, **record)`, whose text is put behind the
record's prompt, and `get_reward(self)`, which is optional.

*An agent program* is a function `run(session, record)` that talks to `session.base_url` with `session.api_key` as to
OpenAI's API and returns a score or None.

Policies that see are shown pictures of PIL where a text is expected, or parts of a message (`Content`).

The words (`Reply`, `Observation`, ...) are in `jaxrlhf.episode`. Processes of users' code import this room, so it loads
nothing heavy.
"""
