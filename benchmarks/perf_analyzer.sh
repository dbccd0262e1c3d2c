#!/usr/bin/env bash
# Measures the `generate` model with NVIDIA's perf_analyzer, on a Linux with an older glibc too.
#
#   benchmarks/perf_analyzer.sh -m generate -u 127.0.0.1:8101 --concurrency-range 8 \
#       --measurement-interval 5000 --max-trials 10
#
# The arguments are perf_analyzer's. `-i grpc --streaming --async`, which models with many responses
# need, are set, and so is `--input-data perf_analyzer_input.json` unless the arguments have their
# own. `--request-count N` makes a short run; its printed throughput counts whole seconds, so it is
# low. The printed latency is that of a whole request; `--profile-export-file FILE` (a new file)
# gets the time of every response.
#
# The program is fetched from PyPI with pip. Its binary needs glibc 2.38. Where it does not start,
# the C and C++ libraries of Debian 13 run it. They are fetched with apt, which works in a folder of
# its own: nothing is installed. Program and libraries are kept in TRIDENTLM_CACHE.
#
# Exit code: perf_analyzer's own; 69 when it could not be fetched or started.
set -euo pipefail

readonly version=2.60.0 suite=trixie
readonly packages=(libc6 libgcc-s1 libssl3t64 libstdc++6 libzstd1 zlib1g)
readonly keyring=/usr/share/keyrings/debian-archive-keyring.gpg
readonly cache=${TRIDENTLM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tridentlm}/perf_analyzer
readonly program=$cache/perf_analyzer-$version libraries=$cache/libraries-$suite
here=$(dirname "$(realpath "$0")")
fresh=
trap 'rm -rf "$fresh"' EXIT

fail() { # MESSAGE [LOG]
    if [[ -n ${2:-} ]]; then tail -n 15 "$2" >&2; fi
    echo "perf_analyzer.sh: $1" >&2
    exit 69
}

require() { # COMMAND REASON
    command -v "$1" >/dev/null || fail "$1 is needed to $2"
}

# The folder appears whole or not at all; of two runs that fetch it at once, the first one's stays.
fetch() { # FOLDER FUNCTION: the function gets an empty folder and makes `result` in it
    if [[ -d $1 ]]; then return; fi
    mkdir -p "$cache" || fail "cannot make $cache"
    fresh=$(mktemp -d "$cache/.fetch.XXXXXX") || fail "cannot write $cache"
    "$2" "$fresh" </dev/null
    chmod 755 "$fresh/result"
    mv -T "$fresh/result" "$1" 2>"$fresh/log" || [[ -d $1 ]] || fail "cannot write $1" "$fresh/log"
    rm -rf "$fresh"
}

fetch_program() { # FOLDER
    local python=${PYTHON:-python3}
    require "$python" "fetch perf_analyzer"
    echo "perf_analyzer.sh: fetching perf-analyzer $version from PyPI" >&2
    # The platform is named because pip would find no wheel for an older glibc.
    "$python" -m pip download --no-input --no-deps --only-binary=:all: --dest "$1" \
        --platform manylinux_2_38_x86_64 "perf-analyzer==$version" >"$1/log" 2>&1 ||
        fail "pip could not fetch perf-analyzer $version" "$1/log"
    "$python" -m zipfile -e "$1"/*.whl "$1/wheel" >"$1/log" 2>&1 ||
        fail "cannot unpack the wheel of perf-analyzer" "$1/log"
    mv "$1/wheel/perf_analyzer/bin" "$1/result"
    chmod 755 "$1/result/perf_analyzer"
}

# The mirrors that this machine's own sources name for its release, then Debian's.
mirrors() {
    local codename
    codename=$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)
    {
        apt-get update --print-uris 2>/dev/null |
            sed -n "s#^'\(.*\)/dists/$codename/main/binary-amd64/Packages.*#\1#p"
        echo http://deb.debian.org/debian
    } | awk '!seen[$0]++'
}

# The machine's apt settings (proxies, say) hold, but for those that name its state, pin releases or
# run hooks: apt must neither read the machine's package lists nor touch them.
write_apt_settings() { # FOLDER
    mkdir -p "$1"/{state/lists,archives}/partial
    cat >"$1/apt.conf" <<END
#clear APT::Update;
#clear DPkg;
#clear APT::Default-Release;
APT::Architecture "amd64";
APT::Update::Error-Mode "any";
APT::Sandbox::User "root";
Acquire::Languages "none";
Dir::State "$1/state";
Dir::State::status "/dev/null";
Dir::Cache "$1";
Dir::Etc::sourcelist "$1/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
END
}

fetch_libraries() { # FOLDER
    local mirror package options="arch=amd64"
    for package in apt-get dpkg; do
        require $package "run perf_analyzer $version, which glibc 2.38 or newer would run as it is"
    done
    if [[ -e $keyring ]]; then options+=" signed-by=$keyring"; fi
    write_apt_settings "$1"
    for mirror in $(mirrors); do
        echo "perf_analyzer.sh: fetching the libraries of Debian $suite from $mirror" >&2
        echo "deb [$options] $mirror $suite main" >"$1/sources.list"
        if (cd "$1" && apt-get -q -c apt.conf update && apt-get -q -c apt.conf download \
            "${packages[@]}") >"$1/log" 2>&1; then break; fi
    done
    for package in "${packages[@]}"; do
        dpkg -x "$1/${package}"_*.deb "$1/root" >>"$1/log" 2>&1 ||
            fail "apt could not fetch the libraries of Debian $suite" "$1/log"
    done
    mv "$1/root/usr/lib/x86_64-linux-gnu" "$1/result"
}

[[ $(uname -sm) == "Linux x86_64" ]] || fail "perf_analyzer exists for Linux on x86-64 only"
fetch "$program" fetch_program
command=("$program/perf_analyzer")
if ! "${command[@]}" --version >/dev/null 2>&1; then
    fetch "$libraries" fetch_libraries
    command=("$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "${command[@]}")
    said=$("${command[@]}" --version 2>&1) ||
        fail "perf_analyzer does not start (remove $cache to fetch it anew): $said"
fi

defaults=(-i grpc --streaming --async)
if [[ " $* " != *" --input-data"[=\ ]* ]]; then
    defaults+=(--input-data "$here/perf_analyzer_input.json")
fi
exec "${command[@]}" "${defaults[@]}" "$@"
