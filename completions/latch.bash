# Completion of latch for bash. Made from the rows of its options; do not edit.

_latch() {
    local cur=${COMP_WORDS[COMP_CWORD]} command= option= operand=0 words= word i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        # bash makes three words of --name=value, and of host:port.
        if [[ $word == = && ${COMP_WORDS[i - 1]} == --* ]]; then
            option=${COMP_WORDS[i - 1]}
        elif [[ $word == [:=]* ]]; then
            ((++i < COMP_CWORD)) || return
        elif [[ $word == -- ]]; then
            [[ $command == @(run) ]] || return
            if declare -F _command_offset >/dev/null; then
                _command_offset $((i + 1)) # of the package bash-completion
            elif ((i + 1 == COMP_CWORD)); then
                mapfile -t COMPREPLY < <(compgen -c -- "$cur")
            else
                _latch_files
            fi
            return
        elif [[ -n $option ]]; then
            option=
        else
            case $word in
                --timeout | -w | --at-least | --max-waiters | --busy-status | -E | --lease | --limit | --of | --slots | --and | --pick | --pick-from | --tag | --kill-after | --leftovers | --on-lost | --server | --shards | --auth-token-file | --connect-timeout | --tls-ca | --tls-name | --for | --format | --fence | --admin-token-file) option=$word ;;
                -*) ;;
                *) if [[ -z $command ]]; then command=$word; else ((operand += 1)); fi ;;
            esac
        fi
    done
    if [[ $cur == = && ${COMP_WORDS[i - 1]} == --* ]]; then
        option=${COMP_WORDS[i - 1]} cur=
    fi
    case $option in
        '') ;;
        --shared | --nested | --tls | --json | --missing-ok | --check)
            COMPREPLY=($(compgen -W 'yes no' -- "$cur"))
            return
            ;;
        --pick-from | --auth-token-file | --tls-ca | --admin-token-file)
            _latch_files
            return
            ;;
        --leftovers)
            COMPREPLY=($(compgen -W 'leave end wait' -- "$cur"))
            return
            ;;
        --on-lost)
            COMPREPLY=($(compgen -W 'term ignore hup int quit usr1 usr2' -- "$cur"))
            return
            ;;
        --format)
            COMPREPLY=($(compgen -W 'table json' -- "$cur"))
            return
            ;;
        *) return ;;
    esac
    case $command in
        '') words='--help --version' ;;
        'run') words='--timeout --nonblock --retry --busy-ok --at-least --max-waiters --busy-status --quiet --verbose --lease --limit --shared --slots --and --pick --pick-from --tag --kill-after --leftovers --on-lost --nested --server --shards --auth-token-file --connect-timeout --tls --tls-ca --tls-name --help --version --' ;;
        'hold') words='--timeout --nonblock --retry --max-waiters --busy-status --quiet --verbose --lease --limit --shared --slots --tag --server --shards --auth-token-file --connect-timeout --tls --tls-ca --tls-name --help --version' ;;
        'wait') words='--timeout --nonblock --quiet --verbose --limit --server --shards --auth-token-file --connect-timeout --tls --tls-ca --tls-name --help --version' ;;
        'acquire') words='--timeout --nonblock --quiet --verbose --lease --limit --shared --json --tag --server --shards --auth-token-file --connect-timeout --tls --tls-ca --tls-name --help --version' ;;
        'reserve') words='--for --tag --timeout --nonblock --quiet --verbose --limit --shared --json --server --shards --auth-token-file --connect-timeout --tls --tls-ca --tls-name --help --version' ;;
        'renew') words='--lease --limit --server --shards --auth-token-file --connect-timeout --tls --tls-ca --tls-name --help --version' ;;
        'release') words='--limit --missing-ok --server --shards --auth-token-file --connect-timeout --tls --tls-ca --tls-name --help --version' ;;
        'stats') words='--format --json --watch --server --shards --auth-token-file --connect-timeout --tls --tls-ca --tls-name --help --version' ;;
        'status') words='--json --server --shards --auth-token-file --connect-timeout --tls --tls-ca --tls-name --help --version' ;;
        'history') words='--check --json --server --shards --auth-token-file --connect-timeout --tls --tls-ca --tls-name --help --version' ;;
        'break') words='--fence --admin-token-file --server --shards --auth-token-file --connect-timeout --tls --tls-ca --tls-name --help --version' ;;
        'ping') words='--server --shards --auth-token-file --connect-timeout --tls --tls-ca --tls-name --help --version' ;;
        'fence-check') words='--help --version' ;;
    esac
    if [[ $cur != -* ]]; then
        case "$command $operand" in
            'run 0') _latch_keys; return ;;
            'hold 0') _latch_keys; return ;;
            'wait 0') _latch_keys; return ;;
            'acquire 0') _latch_keys; return ;;
            'reserve 0') _latch_keys; return ;;
            'renew 0') _latch_keys; return ;;
            'renew 1') return ;;
            'release 0') _latch_keys; return ;;
            'release 1') return ;;
            'stats 0') _latch_keys; return ;;
            'status 0') _latch_keys; return ;;
            'history 0') _latch_keys; return ;;
            'break 0') _latch_keys; return ;;
            'fence-check 0') _latch_files; return ;;
            'fence-check 1') return ;;
            'help 0') words='run hold wait acquire reserve renew release stats status history break ping fence-check' ;;
            ' 0') words='run hold wait acquire reserve renew release stats status history break ping fence-check help version' ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}

_latch_files() {
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
}

_latch_keys() {
    local key
    while read -r key; do
        [[ $key != "$cur"* ]] || COMPREPLY+=("$key")
    done < <(latch stats --json --connect-timeout 1 2>/dev/null |
        grep -o '"key":"[A-Za-z0-9_./@%+,-]*"' | cut -d '"' -f 4 | LC_ALL=C sort -u)
}

complete -F _latch latch
