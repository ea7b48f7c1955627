"""The one exception type for mistakes a user can mend. The command line prints its message without a stack trace."""


class UserError(Exception):
    """Something in the configuration, the data or a checkpoint is not as it must be; the message says what."""
