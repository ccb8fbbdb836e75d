"""The one exception that a user is meant to read: bad input, told in a line."""


class UserError(ValueError):
    """Bad input (a file, a field, a request): the message says in one line what is wrong, where, and how to mend it.

    The command line prints it without a traceback and exits with 2. Anything else that is raised is a bug of ours.
    """
