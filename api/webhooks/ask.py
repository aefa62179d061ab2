"""What a caller may ask for: whether there are webhooks for it here, and where they may go."""

from dataclasses import dataclass
from ipaddress import ip_network

from api.errors import invalid
from api.settings import ApiSettings
from api.webhooks.signing import Secrets
from api.webhooks.target import Forbidden, TargetRules


def rules_of(settings: ApiSettings) -> TargetRules:
    return TargetRules(settings.webhook_allow_http, tuple(map(ip_network, settings.webhook_networks)))


@dataclass(frozen=True, slots=True)
class WebhookDesk:
    """Checks a webhook before anything is queued; its host is looked up when there is something to tell."""

    secrets: Secrets
    rules: TargetRules

    @classmethod
    def open(cls, settings: ApiSettings) -> "WebhookDesk":
        """Raises `InvalidSecrets`."""
        return cls(Secrets.load(settings.webhook_secrets_file), rules_of(settings))

    def check(self, tenant: str, url: str) -> None:
        """Raises `ApiError`."""
        if not self.secrets.of(tenant):
            message = "this server has no secret to sign your webhooks with (DIFFLEET_WEBHOOK_SECRETS_FILE)"
            raise invalid("webhook", message, "webhooks_not_enabled")
        try:
            self.rules.parse(url)
        except Forbidden as error:
            raise invalid("webhook.url", f"webhook.url {error}") from None
