"""Who is calling: API key -> tenant and its salt. Knows no request and no replica."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.keys import tenant_salt
from seams.errors import Forbidden, Unauthenticated
from seams.proof import admin_key, matches

DEFAULT_TENANT = "default"
_SCHEME = "bearer "


@dataclass(frozen=True)
class Tenant:
    """`salt` keeps this tenant's key chains apart from all others'; it never leaves the cluster."""

    name: str
    salt: bytes

    def narrowed(self, cache_salt: str) -> Tenant:
        """This tenant with prefixes that only callers with the same `cache_salt` share; "" changes
        nothing. Whatever a client says, no salt of another tenant comes out."""
        if not cache_salt:
            return self
        framed = b"banyan/cache_salt/1" + cache_salt.encode()
        return Tenant(self.name, hmac.digest(self.salt, framed, "sha256"))


class Tenants:
    """`api_keys` maps key -> tenant name. Without keys everyone is the tenant "default"."""

    def __init__(self, api_keys: Mapping[str, str], cluster_secret: bytes) -> None:
        names = set(api_keys.values()) or {DEFAULT_TENANT}
        self._tenants = {name: Tenant(name, tenant_salt(cluster_secret, name)) for name in names}
        self._keys = [(_digest(key), name) for key, name in api_keys.items()]
        self._admin = _digest(admin_key(cluster_secret))

    def identify(self, authorization: str) -> Tenant:
        """The tenant of a call with this `authorization` metadata ("" = none).

        Takes equally long for every key, right or wrong. Raises Unauthenticated.
        """
        if not self._keys:
            return self._tenants[DEFAULT_TENANT]
        digest, found = _given(authorization), ""
        for known, name in self._keys:
            if matches(known, digest):
                found = name
        if not found:
            raise Unauthenticated("This cluster needs a valid API key.")
        return self._tenants[found]

    def check_admin(self, authorization: str) -> None:
        """Raises Forbidden for a tenant's key, Unauthenticated for all but the admin key else."""
        if matches(self._admin, _given(authorization)):
            return
        if self._keys:
            self.identify(authorization)
            raise Forbidden("This is for the cluster's admin key alone.")
        raise Unauthenticated("This needs the cluster's admin key.")


def _given(authorization: str) -> bytes:
    """Digest of the key in a call's `authorization`; b"" for another scheme."""
    scheme, key = authorization[: len(_SCHEME)], authorization[len(_SCHEME) :]
    return _digest(key.strip()) if scheme.lower() == _SCHEME else b""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
