"""Messages to receivers that a caller has named, once what they asked for has ended (standardwebhooks.com)."""
