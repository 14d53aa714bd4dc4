# Completion of sema for bash. Made from the rows of its options; do not edit.

_sema() {
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
                _sema_files
            fi
            return
        elif [[ -n $option ]]; then
            option=
        else
            case $word in
                --timeout | -w | --stale | --stale-rule | --tag | --of | --token | --mode | --settle | --busy-status | -E | --on-lost | --kill-after | --leftovers | --pid) option=$word ;;
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
        --stale-rule)
            COMPREPLY=($(compgen -W 'age age-and-liveness' -- "$cur"))
            return
            ;;
        --settle)
            COMPREPLY=($(compgen -W 'never takeover always' -- "$cur"))
            return
            ;;
        --on-lost)
            COMPREPLY=($(compgen -W 'term ignore' -- "$cur"))
            return
            ;;
        --leftovers)
            COMPREPLY=($(compgen -W 'leave end wait' -- "$cur"))
            return
            ;;
        *) return ;;
    esac
    case $command in
        '') words='--help --version' ;;
        'run') words='--timeout --nonblock --stale --stale-rule --tag --json --quiet --verbose --of --token --mode --no-sync --settle --busy-status --busy-ok --on-lost --kill-after --leftovers --help --version --' ;;
        'hold') words='--timeout --nonblock --stale --stale-rule --tag --json --quiet --verbose --of --token --mode --no-sync --settle --busy-status --help --version' ;;
        'try') words='--timeout --stale --stale-rule --tag --json --quiet --of --pid --token --mode --no-sync --settle --help --version' ;;
        'acquire') words='--timeout --nonblock --stale --stale-rule --tag --json --quiet --verbose --of --pid --token --mode --no-sync --settle --help --version' ;;
        'release') words='--timeout --stale --stale-rule --tag --json --quiet --of --pid --token --force --help --version' ;;
        'status') words='--timeout --stale --stale-rule --tag --json --quiet --of --help --version' ;;
        'wait') words='--timeout --stale --stale-rule --tag --json --quiet --of --help --version' ;;
        'clean') words='--timeout --stale --stale-rule --tag --json --quiet --force --help --version' ;;
    esac
    if [[ $cur != -* ]]; then
        case "$command $operand" in
            'run 0') _sema_files; return ;;
            'hold 0') _sema_files; return ;;
            'try 0') _sema_files; return ;;
            'acquire 0') _sema_files; return ;;
            'release 0') _sema_files; return ;;
            'status 0') _sema_files; return ;;
            'wait 0') _sema_files; return ;;
            'clean 0') _sema_files; return ;;
            'help 0') words='run hold try acquire release status wait clean' ;;
            ' 0') words='run hold try acquire release status wait clean help version' ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}

_sema_files() {
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
}

complete -F _sema sema
