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
                --host | --port | --unix | --unix-mode | --unix-group | --http | --http-port | --http-name | --max-locks | --max-slots | --max-per-connection | --max-waiters | --max-waiters-total | --max-kept | --max-keep-time | --max-hold | --max-connections | --max-connections-per-ip | --http-max-waiting | --read-timeout | --write-timeout | --gc-max-idle | --gc-interval | --default-lease-ttl | --lease-sweep-interval | --fence-state-file | --state-file | --handover-file | --settle | --shutdown-timeout | --idle-exit | --auth-token | --auth-token-file | --admin-token-file | --tls-cert | --tls-key | --log | --log-file | --log-timestamps | --expect | --etcd | --advertise | --etcd-prefix | --etcd-ttl | --etcd-user | --etcd-password-file | --etcd-cacert | --etcd-cert | --etcd-key) option=$word ;;
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
        --inetd | --print-port | --http-grants | --auto-release-on-disconnect | --no-auto-release-on-disconnect | --local-clients | --operator-socket | --log-grants | --debug)
            COMPREPLY=($(compgen -W 'yes no' -- "$cur"))
            return
            ;;
        --unix | --fence-state-file | --state-file | --handover-file | --auth-token-file | --admin-token-file | --tls-cert | --tls-key | --log-file | --etcd-password-file | --etcd-cacert | --etcd-cert | --etcd-key)
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
        '') words='--host --port --unix --unix-mode --unix-group --inetd --print-port --http --http-port --http-name --http-grants --max-locks --max-slots --max-per-connection --max-waiters --max-waiters-total --max-kept --max-keep-time --max-hold --max-connections --max-connections-per-ip --http-max-waiting --read-timeout --write-timeout --gc-max-idle --gc-interval --default-lease-ttl --auto-release-on-disconnect --no-auto-release-on-disconnect --lease-sweep-interval --fence-state-file --state-file --handover-file --settle --local-clients --shutdown-timeout --idle-exit --auth-token --auth-token-file --admin-token-file --operator-socket --tls-cert --tls-key --log --log-file --log-timestamps --log-grants --expect --debug --etcd --advertise --etcd-prefix --etcd-ttl --etcd-user --etcd-password-file --etcd-cacert --etcd-cert --etcd-key --help --version' ;;
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
