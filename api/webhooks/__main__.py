"""Make a secret for webhooks: `python -m api.webhooks`. It goes into the file of `webhook_secrets_file`."""

from api.webhooks.signing import new_secret

if __name__ == "__main__":
    print(new_secret())
