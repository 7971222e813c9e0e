"""The command `fedtrain`: what an operator does beside running servers and clients.

fedtrain certificates --host fl.example.org      an authority and a server certificate, to try TLS with
fedtrain key --id ward-3                         a client's id and public key, for the server's operator
fedtrain clients allow clients.txt ward-3 KEY    let a client join, or give it another key
fedtrain clients list clients.txt
fedtrain clients revoke clients.txt ward-3
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedtrain.client.identity import default_state_dir, require_client_id
from fedtrain.errors import ConfigError
from fedtrain.security.allow import allow, key_text, read_allow_list, revoke
from fedtrain.security.certificates import LOOPBACK_HOSTS, make_certificates
from fedtrain.security.keys import load_or_create_key, public_pem


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if it did what was asked, 2 (with a message on standard error) if it can't."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _certificates(options: argparse.Namespace) -> None:
    hosts = options.host or LOOPBACK_HOSTS
    made = make_certificates(options.dir, hosts, days=options.days, force=options.force)
    example = next((host for host in made.hosts if "*" not in host), "HOST")
    address = f"[{example.strip('[]')}]:9092" if ":" in example else f"{example}:9092"
    authority = "a new authority; clients need this file" if made.new_authority else "the authority, as before"
    print(
        f"{made.certificate}: for {', '.join(made.hosts)}, until {made.expires:%Y-%m-%d %H:%M} UTC\n"
        f"{made.ca}: {authority}\n"
        f"keep {made.key} on the server, and {made.ca.with_name('ca-key.pem')} where nobody else reads it\n\n"
        f"fedtrain-server server.certificate={made.certificate} server.key={made.key} ...\n"
        f"""fedtrain-client 'server.addresses=["{address}"]' server.ca={made.ca} ..."""
    )


def _key(options: argparse.Namespace) -> None:
    if options.id is None and options.state_dir is None:
        raise ConfigError("expected --id ID or --state-dir DIR, found neither: say which client is meant")
    folder = options.state_dir or default_state_dir(require_client_id(options.id))
    key = key_text(public_pem(load_or_create_key(folder)))
    print(key if options.id is None else f"{require_client_id(options.id)} {key}")


def _allow(options: argparse.Namespace) -> None:
    replaced = allow(options.file, options.id, _given_key(options.key, options.id))
    print(f"{options.file}: {options.id} {'has another key now' if replaced else 'may join'}")


def _list(options: argparse.Namespace) -> None:
    for client, key in read_allow_list(options.file).items():
        print(client, key)


def _revoke(options: argparse.Namespace) -> None:
    revoke(options.file, options.id)
    print(f"{options.file}: {options.id} may not join any more")


def _given_key(text: str, client: str) -> str:
    """The key itself, what `fedtrain key` printed, or what a file of that name holds."""
    try:
        if Path(text).is_file():
            text = Path(text).read_text()
    except (OSError, ValueError):  # too long for a path, or not text: then it is no key either
        pass
    fields = text.split()
    if len(fields) == 2:
        if fields[0] != client:
            raise ConfigError(f"expected the key of {client!r}, found that of {fields[0]!r}: which one is meant?")
        return fields[1]
    return text.strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedtrain", description="Certificates, keys, and who may join.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("certificates", help="make an authority and a server certificate, to try TLS with")
    command.add_argument("--dir", type=Path, default=Path("certificates"), help="folder (default: %(default)s)")
    command.add_argument(
        "--host",
        nargs="+",
        help=f"names and addresses that clients find the server under (default: {' '.join(LOOPBACK_HOSTS)})",
    )
    command.add_argument("--days", type=int, default=365, help="validity, >= 1 (default: %(default)s)")
    command.add_argument("--force", action="store_true", help="replace the server's certificate; the authority stays")
    command.set_defaults(run=_certificates)

    command = commands.add_parser("key", help="print a client's public key; it is made if there is none")
    command.add_argument("--id", help="the client's id")
    command.add_argument("--state-dir", type=Path, help="its state folder, if that is not the default one")
    command.set_defaults(run=_key)

    clients = commands.add_parser("clients", help="edit the list of clients that may join (clients.allow)")
    actions = clients.add_subparsers(required=True, metavar="ACTION")
    action = actions.add_parser("allow", help="add a client, or replace its key")
    action.add_argument("file", type=Path, metavar="FILE")
    action.add_argument("id", metavar="ID")
    action.add_argument("key", metavar="KEY", help="what `fedtrain key` prints, or a file that holds it")
    action.set_defaults(run=_allow)
    action = actions.add_parser("list", help="print the clients and their keys")
    action.add_argument("file", type=Path, metavar="FILE")
    action.set_defaults(run=_list)
    action = actions.add_parser("revoke", help="take a client off the list")
    action.add_argument("file", type=Path, metavar="FILE")
    action.add_argument("id", metavar="ID")
    action.set_defaults(run=_revoke)
    return parser


if __name__ == "__main__":
    sys.exit(main())
