{{- /* The name of all objects of the webhook; its certificate is for the Service of this name. */ -}}
{{- define "mpsd.webhook" -}}
{{ include "mpsd.fullname" . }}-webhook
{{- end -}}

{{- /* Not mpsd.selector: the DaemonSet and the PodMonitor select by that. */ -}}
{{- define "mpsd.webhookSelector" -}}
app.kubernetes.io/name: {{ include "mpsd.name" . }}-webhook
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* What a pod of the webhook, and one of its certificate, have in common: `restricted`. */ -}}
{{- define "mpsd.webhookPod" -}}
{{- with .Values.webhook.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.webhook.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- if not .Values.openshift }}
  runAsUser: 65534
  runAsGroup: 65534
  fsGroup: 65534
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "mpsd.webhookContainer" -}}
image: {{ include "mpsd.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [mpsd-kubernetes]
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- /* The job that makes and renews the webhook's certificate. */ -}}
{{- define "mpsd.webhookRenewal" -}}
backoffLimit: 6
activeDeadlineSeconds: 600
template:
  metadata:
    labels:
      app.kubernetes.io/name: {{ include "mpsd.name" . }}-webhook-certificate
      app.kubernetes.io/instance: {{ .Release.Name }}
      {{- with merge dict .Values.podLabels .Values.commonLabels }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- with merge dict .Values.podAnnotations .Values.commonAnnotations }}
    annotations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    {{- include "mpsd.webhookPod" . | trim | nindent 4 }}
    serviceAccountName: {{ include "mpsd.webhook" . }}-certificate
    automountServiceAccountToken: true
    restartPolicy: OnFailure
    containers:
      - name: certificate
        {{- include "mpsd.webhookContainer" . | nindent 8 }}
        env:
          - name: NVIDIA_VISIBLE_DEVICES  # needs no GPU
            value: void
        args: [--renew-certificate, {{ include "mpsd.webhook" . }}]
        terminationMessagePolicy: FallbackToLogsOnError
        resources:
          {{- toYaml .Values.webhook.resources | nindent 10 }}
{{- end -}}
