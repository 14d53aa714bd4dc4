# Completion of latchd for bash. Made from the rows of its options; do not edit.

_latchd() {
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
                --host | --port | --unix | --unix-mode | --unix-group | --default-lease-ttl | --lease-sweep-interval | --gc-interval | --gc-max-idle | --max-locks | --max-connections | --max-connections-per-ip | --max-slots | --max-per-connection | --max-waiters | --max-waiters-total | --max-kept | --max-keep-time | --max-hold | --read-timeout | --write-timeout | --shutdown-timeout | --auth-token | --auth-token-file | --admin-token-file | --http | --http-port | --http-name | --http-max-waiting | --log | --log-file | --log-timestamps | --fence-state-file | --state-file | --handover-file | --settle | --idle-exit | --etcd | --advertise | --etcd-prefix | --etcd-ttl | --etcd-user | --etcd-password-file | --etcd-cacert | --etcd-cert | --etcd-key | --tls-cert | --tls-key) option=$word ;;
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
        --operator-socket | --auto-release-on-disconnect | --no-auto-release-on-disconnect | --http-grants | --print-port | --log-grants | --debug | --local-clients | --inetd)
            COMPREPLY=($(compgen -W 'yes no' -- "$cur"))
            return
            ;;
        --unix | --auth-token-file | --admin-token-file | --log-file | --fence-state-file | --state-file | --handover-file | --etcd-password-file | --etcd-cacert | --etcd-cert | --etcd-key | --tls-cert | --tls-key)
            _latchd_files
            return
            ;;
        --log)
            COMPREPLY=($(compgen -W 'stderr syslog' -- "$cur"))
            return
            ;;
        --log-timestamps)
            COMPREPLY=($(compgen -W 'auto always never' -- "$cur"))
            return
            ;;
        *) return ;;
    esac
    case $command in
        '') words='--host --port --unix --unix-mode --unix-group --operator-socket --default-lease-ttl --lease-sweep-interval --gc-interval --gc-max-idle --max-locks --max-connections --max-connections-per-ip --max-slots --max-per-connection --max-waiters --max-waiters-total --max-kept --max-keep-time --max-hold --read-timeout --write-timeout --shutdown-timeout --auto-release-on-disconnect --no-auto-release-on-disconnect --auth-token --auth-token-file --admin-token-file --http --http-port --http-name --http-grants --http-max-waiting --print-port --log --log-file --log-timestamps --log-grants --debug --fence-state-file --state-file --handover-file --settle --local-clients --inetd --idle-exit --etcd --advertise --etcd-prefix --etcd-ttl --etcd-user --etcd-password-file --etcd-cacert --etcd-cert --etcd-key --tls-cert --tls-key --help --version' ;;
    esac
    if [[ $cur != -* ]]; then
        case "$command $operand" in
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}

_latchd_files() {
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen -f -- "$cur")
}

complete -F _latchd latchd
