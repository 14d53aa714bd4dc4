# Completion of lfpd for bash. Made from the rows of its options; do not edit.

_lfpd() {
    local cur=${COMP_WORDS[COMP_CWORD]} command= option= operand=0 words= word i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        # bash makes three words of --name=value, and of host:port.
        if [[ $word == = && ${COMP_WORDS[i - 1]} == --* ]]; then
            option=${COMP_WORDS[i - 1]}
        elif [[ $word == [:=]* ]]; then
            ((++i < COMP_CWORD)) || return
        elif [[ -n $option ]]; then
            option=
        else
            case $word in
                --listen | --unix | --lock-dir | --search-dirs | --peer-uid | --idle-timeout | --max-connections | --log | --log-file) option=$word ;;
                -*) ;;
                *) ((operand += 1)) ;;
            esac
        fi
    done
    if [[ $cur == = && ${COMP_WORDS[i - 1]} == --* ]]; then
        option=${COMP_WORDS[i - 1]} cur=
    fi
    case $option in
        '') ;;
        --inetd | --stdio | --require-live-pid | --print-port | --debug)
            COMPREPLY=($(compgen -W 'yes no' -- "$cur"))
            return
            ;;
        --unix | --lock-dir | --log-file)
            _lfpd_files
            return
            ;;
        --peer-uid)
            COMPREPLY=($(compgen -W 'enforce log off' -- "$cur"))
            return
            ;;
        --log)
            COMPREPLY=($(compgen -W 'stderr syslog' -- "$cur"))
            return
            ;;
        *) return ;;
    esac
    case $command in
        '') words='--inetd --stdio --listen --unix --lock-dir --search-dirs --peer-uid --require-live-pid --idle-timeout --max-connections --print-port --log --log-file --debug --help --version' ;;
    esac
    if [[ $cur != -* ]]; then
        case "$command $operand" in
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}

_lfpd_files() {
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
}

complete -F _lfpd lfpd
